# SPDX-License-Identifier: Apache-2.0
"""Support for runs without an accelerator: a CPU platform for verl, weight transfer, forked workers, and a built-in
task.
"""

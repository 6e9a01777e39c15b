# SPDX-License-Identifier: Apache-2.0
"""Support for runs without an accelerator: a CPU platform for verl, weight transfer in host memory, a fork server that
starts worker processes quickly, and a built-in task.
"""

# SPDX-License-Identifier: Apache-2.0
"""Support for runs without an accelerator: a CPU platform for verl, weight transfer through host memory, worker
processes that start as forks, and a built-in task.
"""

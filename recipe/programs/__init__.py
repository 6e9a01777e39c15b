# SPDX-License-Identifier: Apache-2.0
"""The reward of programming tasks, which runs the programs of answers in a sandbox."""

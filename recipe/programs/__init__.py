# SPDX-License-Identifier: Apache-2.0
"""The reward function for programming tasks, which runs the program of each answer in a sandbox."""

# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a local CPU run quickly, as forks of a process that has imported torch, vLLM and verl."""

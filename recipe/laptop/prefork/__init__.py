# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a local CPU run as forks of one that has imported the stack."""

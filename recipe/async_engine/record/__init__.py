# SPDX-License-Identifier: Apache-2.0
"""Writes, reads and locks the files in a run's folder (events, metrics, summary); checks checkpoints' contents."""

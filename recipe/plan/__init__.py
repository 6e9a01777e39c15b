# SPDX-License-Identifier: Apache-2.0
"""Estimates memory and throughput of a run before its launch, without importing Ray, torch, verl or an engine."""

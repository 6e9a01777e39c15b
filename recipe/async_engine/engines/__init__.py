# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: reservation of accelerators, the manager of all replicas, and an implementation for each engine."""

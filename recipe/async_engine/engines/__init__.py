# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: their accelerators, the manager of all replicas, and the vLLM implementation."""

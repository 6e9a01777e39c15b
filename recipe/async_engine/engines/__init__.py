# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: their accelerators, all of them together, and vLLM's."""

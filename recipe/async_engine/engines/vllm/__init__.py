# SPDX-License-Identifier: Apache-2.0
"""Rollout servers on vLLM that know the version of their weights, and do not answer while weights are incomplete."""

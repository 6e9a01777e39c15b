# SPDX-License-Identifier: Apache-2.0
"""Rollout servers on vLLM that know which weights they hold, and answer only with complete ones."""

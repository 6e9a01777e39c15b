# SPDX-License-Identifier: Apache-2.0
"""Rollout servers on vLLM that track which weights version they hold, and answer only with complete weights."""

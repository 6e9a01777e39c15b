# SPDX-License-Identifier: Apache-2.0
"""The loss where the policy that sampled is itself the proximal one: verl's, with the mismatch metrics of every source.

verl's trainers ask for its loss ``bypass_mode`` after the workers have been given their configuration
(rollout_corr_helper.py:1148), so ``algorithm.rollout_correction`` had no effect there; here it is asked for before.
Shown by tests/integration/test_loglinear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_bypass_mode, register_policy_loss

from recipe.async_engine.logprobs.mismatch import mismatch_metrics, neutral

LOSS = "recipe_bypass"


@register_policy_loss(LOSS)
def bypass_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's signature of a policy loss, tensors (rows, R)."""
    if not response_mask.any():
        old_log_prob, advantages, response_mask = neutral(log_prob, advantages, response_mask)
    loss, metrics = compute_policy_loss_bypass_mode(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    return loss, mismatch_metrics(log_prob.detach(), old_log_prob, response_mask) | metrics

# SPDX-License-Identifier: Apache-2.0
"""The loss where the policy that sampled is itself the proximal one: the chosen one, corrected.

Most losses have a ratio to the proximal policy, which is the importance weight here: verl's PPO loss for this case is
given none beside it (core_algos.py:2441), and neither are the others. `WEIGHED` are those without one. verl's trainers
ask for their loss ``bypass_mode`` after the workers have been given their configuration (rollout_corr_helper.py:1148),
so ``algorithm.rollout_correction`` had no effect there, and it knows two losses only. Shown by
tests/integration/test_corrected.py and test_loglinear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from recipe.async_engine.config.rules.algorithm import has_ratio
from recipe.async_engine.trainer.log_probs.corrected import Loss, corrected

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
) -> Loss:
    """verl's signature of a policy loss, tensors (rows, R)."""

    def anchors(sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sampled, log_prob.detach()

    def takes_weights(loss: str) -> bool:
        return not has_ratio(loss)

    return corrected(anchors, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, takes_weights)

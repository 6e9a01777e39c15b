# SPDX-License-Identifier: Apache-2.0
"""Proximal log-probs interpolated between the sampling and the current policy, inside the loss.

Li, Wu, Shen: A-3PO, Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation
(arXiv 2512.06547). With d the staleness of a token, the published version less the one that sampled it, and the weights
of version v + 1 in the making:

    log pi_prox = log pi_behave + d / (d + 1) * (log pi_theta - log pi_behave)

so an on-policy token (d = 0) has the sampling policy itself as its anchor. pi_theta is a constant in it (no gradient).
The loss is then the decoupled one: the chosen loss (PPO's) around pi_prox, times the weights pi_prox / pi_behave as
``algorithm.rollout_correction`` asks for them. No forward pass is added.

verl hands a registered loss its columns by name and has none for versions: the shares d / (d + 1) travel in the column
``rollout_is_weights``, which has no other use here, since the weights are computed in the loss. Shown by
tests/integration/test_loglinear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from recipe.async_engine.core.versions import NOT_SAMPLED
from recipe.async_engine.trainer.log_probs.corrected import Loss, corrected

LOSS = "recipe_loglinear"


def shares(token_versions: torch.Tensor, version: int) -> torch.Tensor:
    """d / (d + 1) of each token, float32, 0 where nothing was sampled; ``token_versions`` is int64, any shape."""
    age = (version - token_versions).float()
    return torch.where(token_versions == NOT_SAMPLED, 0.0, age / (age + 1))


@register_policy_loss(LOSS)
def loglinear_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> Loss:
    """verl's signature of a policy loss, tensors (rows, R); ``rollout_is_weights`` has the shares, see the module."""
    assert rollout_is_weights is not None

    def anchors(sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        proximal = sampled + rollout_is_weights * (log_prob - sampled)
        return proximal, proximal

    return corrected(anchors, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, lambda _: True)

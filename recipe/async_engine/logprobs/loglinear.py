# SPDX-License-Identifier: Apache-2.0
"""Proximal log-probs interpolated between the sampling and the current policy, inside the loss.

Li, Wu, Shen: A-3PO, Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation
(arXiv 2512.06547). With d the staleness of a token, the published version less the one that sampled it, and the weights
of version v + 1 in the making:

    log pi_prox = log pi_behave + d / (d + 1) * (log pi_theta - log pi_behave)

so an on-policy token (d = 0) has the sampling policy itself as its anchor. pi_theta is a constant in it (no gradient).
The loss is then the decoupled one: PPO's clipped loss around pi_prox, times the weights pi_prox / pi_behave as
``algorithm.rollout_correction`` asks for them. No forward pass is added.

verl hands a registered loss its columns by name and has none for versions: the shares d / (d + 1) travel in the column
``rollout_is_weights``, which has no other use here, since the weights are computed in the loss. Shown by
tests/integration/test_loglinear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from recipe.async_engine.core.versions import NOT_SAMPLED
from recipe.async_engine.logprobs.mismatch import mismatch_metrics, neutral

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
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's signature of a policy loss, tensors (rows, R); ``rollout_is_weights`` has the shares, see the module."""
    assert config is not None and rollout_is_weights is not None
    if not response_mask.any():
        old_log_prob, advantages, response_mask = neutral(log_prob, advantages, response_mask)
    sampled, correction = old_log_prob, config.policy_loss.rollout_correction
    with torch.no_grad():
        proximal = sampled + rollout_is_weights * (log_prob - sampled)
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            old_log_prob=proximal,
            rollout_log_prob=sampled,
            response_mask=response_mask,
            rollout_is=correction.get("rollout_is"),
            rollout_is_threshold=correction.get("rollout_is_threshold", 2.0),
            rollout_is_batch_normalize=correction.get("rollout_is_batch_normalize", False),
            rollout_rs=correction.get("rollout_rs"),
            rollout_rs_threshold=correction.get("rollout_rs_threshold"),
        )
        metrics = mismatch_metrics(proximal, sampled, response_mask) | metrics
    loss, loss_metrics = compute_policy_loss_vanilla(
        old_log_prob=proximal,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=None if weights is None else weights.batch["rollout_is_weights"],
    )
    return loss, loss_metrics | metrics

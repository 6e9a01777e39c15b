# SPDX-License-Identifier: Apache-2.0
"""A loss of verl's, or of the user's, with ``algorithm.rollout_correction`` computed within it.

Contract: whatever loss ``actor.policy_loss.loss_mode`` names is the one that trains. It is given the mask that the
correction's rejection leaves, and the importance weights where it has a use for them. verl's ``loss_type=reinforce``
names a loss too, and has no other name. Shown by tests/integration/test_corrected.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from recipe.async_engine.trainer.log_probs.mismatch import mismatch_metrics, neutral

CHOSEN = "loss_mode"
"""Beside verl's own keys in the ``rollout_correction`` that workers are given: the loss that was chosen."""

Loss = tuple[torch.Tensor, dict[str, Any]]


def corrected(
    anchors: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    sampled: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    takes_weights: Callable[[str], bool],
) -> Loss:
    """The chosen loss and its metrics, with those of the mismatch; tensors are (rows, R).

    Args:
        anchors: of the policy that sampled: the policy that the loss measures from, and the one that the weights are
            of, in place of the one that sampled. Neither has a gradient.
        sampled: log-probs of the policy that sampled.
        takes_weights: whether the loss of this name is multiplied by the weights.
    """
    if not response_mask.any():
        sampled, advantages, response_mask = neutral(log_prob, advantages, response_mask)
    correction = config.policy_loss.rollout_correction
    name = correction.get(CHOSEN, "vanilla")
    with torch.no_grad():
        anchor, weighed = anchors(sampled)
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            old_log_prob=weighed,
            rollout_log_prob=sampled,
            response_mask=response_mask,
            rollout_is=correction.get("rollout_is"),
            rollout_is_threshold=correction.get("rollout_is_threshold", 2.0),
            rollout_is_batch_normalize=correction.get("rollout_is_batch_normalize", False),
            rollout_rs=correction.get("rollout_rs"),
            rollout_rs_threshold=correction.get("rollout_rs_threshold"),
        )
        metrics = mismatch_metrics(weighed, sampled, response_mask) | metrics
    applied = weights.batch["rollout_is_weights"] if weights is not None and takes_weights(name) else None
    given = {"log_prob": log_prob, "advantages": advantages, "response_mask": mask, "loss_agg_mode": loss_agg_mode}
    if name == "reinforce":
        loss, of_loss = compute_policy_loss_reinforce(anchor, **given, config=config, rollout_is_weights=applied)
    else:
        loss, of_loss = get_policy_loss_fn(name)(
            old_log_prob=anchor, **given, config=config, rollout_is_weights=applied
        )
    return loss, of_loss | metrics

# SPDX-License-Identifier: Apache-2.0
"""How far the proximal policy is from the one that sampled, whether or not anything is corrected for it; its entropy.

verl's metrics under verl's names (``rollout_corr/*``); those of the importance weights it computes only where weights
are applied, so they are computed here. Shown by tests/integration/test_log_prob_columns.py.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs

SAFETY_BOUND = 20.0
"""verl's: log ratios are clamped to it before they are exponentiated."""


def mismatch_metrics(proximal: torch.Tensor, sampled: torch.Tensor, response_mask: torch.Tensor) -> dict[str, float]:
    """Metrics of the untruncated token ratios ``exp(proximal - sampled)``.

    Args:
        proximal: log-probs of the proximal policy, (rows, R).
        sampled: of the policy that sampled, (rows, R).
        response_mask: 1 for the tokens that are trained, (rows, R).

    Returns:
        verl's KL, perplexity and chi-squared metrics, mean and maximum of the ratios, and the effective sample size
        as a share of the tokens, ``1 / mean((w / mean(w))^2)``.
    """
    metrics = compute_rollout_corr_metrics_from_logprobs(proximal, sampled, response_mask)
    ratios = torch.exp((proximal - sampled).clamp(-SAFETY_BOUND, SAFETY_BOUND))[response_mask.bool()]
    mean = ratios.mean()
    return metrics | {
        "rollout_corr/rollout_is_mean": mean.item(),
        "rollout_corr/rollout_is_max": ratios.max().item(),
        "rollout_corr/rollout_is_min": ratios.min().item(),
        "rollout_corr/rollout_is_eff_sample_size": (1.0 / (ratios / mean).square().mean()).item(),
    }


def neutral(
    log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sampled log-probs, advantages and mask that give a micro-batch without trainable tokens the loss 0.

    verl's correction raises where the mask is empty. Its ranks must report equally many values of each metric
    (utils/metric/utils.py:143), so these report what a policy that equals the sampling one does.
    """
    return log_prob.detach(), torch.zeros_like(advantages), torch.ones_like(response_mask)


def entropy_metric(entropy: torch.Tensor, response_mask: torch.Tensor, actor: Any) -> dict[str, float]:
    """``actor/entropy`` of a batch, aggregated as the loss is (verl/experimental/separation/ray_trainer.py:522).

    Args:
        entropy: of each token's distribution, (rows, R).
        response_mask: 1 for the tokens that are trained, (rows, R).
        actor: verl's section ``actor_rollout_ref.actor``.
    """
    total = agg_loss(
        loss_mat=entropy,
        loss_mask=response_mask,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    )
    return {"actor/entropy": total.item()}

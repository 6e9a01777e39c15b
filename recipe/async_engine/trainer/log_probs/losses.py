# SPDX-License-Identifier: Apache-2.0
"""The losses of the two sources whose proximal policy is not computed beforehand, and the mismatch that all report.

Contract: whatever loss ``actor.policy_loss.loss_mode`` names, verl's or the user's, is the one that trains, with
``algorithm.rollout_correction`` computed within it. It is given the mask that the correction's rejection leaves, and
the importance weights where it has a use for them. verl's ``loss_type=reinforce`` names a loss too, and has no other
name. The mismatch has verl's names (``rollout_corr/*``), whether or not anything is corrected for it; verl computes
metrics of the importance weights only where weights are applied.

`BYPASS`: the policy that sampled is itself the proximal one. Most losses have a ratio to the proximal policy, which is
the importance weight here: verl's PPO loss for this case is given none beside it (core_algos.py:2441), and neither are
the others. verl's trainers ask for their loss ``bypass_mode`` after the workers have been given their configuration
(rollout_corr_helper.py:1148), so ``algorithm.rollout_correction`` had no effect there, and it knows two losses only.

`LOGLINEAR`: interpolated between the sampling and the current policy (Li, Wu, Shen: A-3PO, arXiv 2512.06547). With d
the staleness of a token, the published version less the one that sampled it:

    log pi_prox = log pi_behave + d / (d + 1) * (log pi_theta - log pi_behave)

so an on-policy token (d = 0) has the sampling policy itself as its anchor. pi_theta is a constant in it (no gradient).
The loss is then the decoupled one: the chosen loss around pi_prox, times the weights pi_prox / pi_behave as
``algorithm.rollout_correction`` asks for them. verl hands a registered loss its columns by name and has none for
versions: the shares d / (d + 1) travel in the column ``rollout_is_weights``, which has no other use here.

Shown by tests/integration/test_corrected.py, test_loglinear.py and test_log_prob_columns.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce, get_policy_loss_fn, register_policy_loss
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_rejection_mask,
)

from recipe.async_engine.config.rules.algorithm import has_ratio
from recipe.async_engine.core.versions import NOT_SAMPLED

BYPASS, LOGLINEAR = "recipe_bypass", "recipe_loglinear"
CHOSEN = "loss_mode"
"""The key of the chosen loss, beside verl's own keys in the ``rollout_correction`` that workers are given."""
SAFETY_BOUND = 20.0
"""verl clamps log ratios to this before exponentiating them."""

Loss = tuple[torch.Tensor, dict[str, Any]]


def shares(token_versions: torch.Tensor, version: int) -> torch.Tensor:
    """Return d / (d + 1) of each token, float32, and 0 if nothing was sampled, for int64 ``token_versions`` of any
    shape.
    """
    age = (version - token_versions).float()
    return torch.where(token_versions == NOT_SAMPLED, 0.0, age / (age + 1))


@register_policy_loss(BYPASS)
def bypass_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> Loss:
    """The policy loss for `BYPASS`, with verl's signature and tensors (rows, R)."""

    def anchors(sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sampled, log_prob.detach()

    def takes_weights(loss: str) -> bool:
        return not has_ratio(loss)

    return corrected(anchors, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, takes_weights)


@register_policy_loss(LOGLINEAR)
def loglinear_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> Loss:
    """The policy loss for `LOGLINEAR`, with verl's signature and tensors (rows, R).

    ``rollout_is_weights`` has the shares, as the module's docstring explains.
    """
    assert rollout_is_weights is not None

    def anchors(sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        proximal = sampled + rollout_is_weights * (log_prob - sampled)
        return proximal, proximal

    return corrected(anchors, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, lambda _: True)


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

    A micro-batch without trainable tokens has the loss 0 and reports what a policy that equals the sampling one does:
    verl's correction raises there, and its ranks must report equally many values of each metric
    (utils/metric/utils.py:143).

    Args:
        anchors: of the policy that sampled: the policy that the loss measures from, and the one that the weights are
            of, in place of the one that sampled. Neither has a gradient.
        sampled: log-probs of the policy that sampled.
        takes_weights: whether the loss of this name is multiplied by the weights.
    """
    if not response_mask.any():
        sampled, advantages = log_prob.detach(), torch.zeros_like(advantages)
        response_mask = torch.ones_like(response_mask)
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
    given |= {"config": config, "rollout_is_weights": applied}
    if name == "reinforce":
        loss, of_loss = compute_policy_loss_reinforce(anchor, **given)
    else:
        loss, of_loss = get_policy_loss_fn(name)(old_log_prob=anchor, **given)
    return loss, of_loss | metrics


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

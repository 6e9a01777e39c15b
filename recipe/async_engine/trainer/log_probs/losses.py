# SPDX-License-Identifier: Apache-2.0
"""The policy losses for `BYPASS` and `LOGLINEAR`, and the mismatch metrics of all sources of proximal log-probs.

Contract: both losses wrap the chosen loss, which is verl's or a user's loss with the name in
``actor.policy_loss.loss_mode``, or verl's ``loss_type=reinforce``. They apply ``algorithm.rollout_correction``
themselves. The chosen loss gets the mask without the tokens that the correction rejects, and the importance weights if
it needs them. The metrics of the mismatch between behaviour and proximal policy have verl's names
(``rollout_corr/*``). They are reported even without a correction, whereas verl reports metrics of the importance
weights only if it applies the weights.

`BYPASS`: the proximal policy is the behaviour policy, which sampled the answers. The ratio in most losses is then
already the importance weight, so these losses get no additional weights, as in verl's PPO loss for this case
(core_algos.py:2441). verl's own loss ``bypass_mode`` is not used: it supports only two losses, and verl selects it only
after the workers have got their configuration (rollout_corr_helper.py:1109), so ``algorithm.rollout_correction`` would
have no effect.

`LOGLINEAR`: the proximal policy is interpolated between the behaviour policy and the current policy (Li, Wu, Shen:
A-3PO, arXiv 2512.06547). With d the staleness of a token, which is the published version minus the version that sampled
the token:

    log pi_prox = log pi_behave + d / (d + 1) * (log pi_theta - log pi_behave)

For an on-policy token (d = 0), pi_prox is pi_behave. No gradient flows through pi_theta in this formula. The loss is
the decoupled one: the chosen loss with its ratio to pi_prox, times the weights pi_prox / pi_behave if
``algorithm.rollout_correction`` asks for weights. verl passes columns to a registered loss by name and has no column
for versions, so the column ``rollout_is_weights``, which is otherwise unused here, carries the shares d / (d + 1).
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
"""Key that this package adds to ``rollout_correction`` in the workers' settings, with the name of the chosen loss."""
SAFETY_BOUND = 20.0
"""The absolute value to which verl clamps log ratios before it exponentiates them."""

Loss = tuple[torch.Tensor, dict[str, Any]]


def shares(token_versions: torch.Tensor, version: int) -> torch.Tensor:
    """Return d / (d + 1), float32, for each token, where d is the token's staleness at the published ``version``.

    ``token_versions`` is int64 of any shape: the version that sampled each token, or `NOT_SAMPLED`, which gives 0.
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
    """Return the policy loss for `BYPASS`, and its metrics. verl defines the signature; tensors are (rows, R)."""

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
    """Return the policy loss for `LOGLINEAR`, and its metrics. verl defines the signature; tensors are (rows, R).

    ``rollout_is_weights`` does not have weights here but d / (d + 1), where d is a token's staleness (`shares`).
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
    """Return the chosen loss with verl's rollout correction, and metrics of the loss and the mismatch.

    All tensors are (rows, R). For a micro-batch without trained tokens, the loss is 0, and the metrics are computed as
    if the behaviour policy were the current policy. verl's correction would raise an error in this case, but all ranks
    have to report the same number of values of each metric (utils/metric/utils.py:143).

    Args:
        anchors: a function that takes the behaviour policy's log-probs. It returns the log-probs in the denominator of
            the loss's ratio and those in the numerator of the importance weights, both without gradient.
        sampled: log-probs of the behaviour policy.
        takes_weights: a function that returns whether the loss with a given name is multiplied by the weights.
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
    """Return metrics of the untruncated token ratios ``exp(proximal - sampled)``.

    ``proximal`` and ``sampled`` are the log-probs of the proximal and the behaviour policy, (rows, R).
    ``response_mask``, (rows, R), is 1 for trained tokens.

    Returns:
        verl's KL, perplexity and chi-squared metrics; mean, maximum and minimum of the ratios w; and the effective
        sample size as a share of the tokens, ``1 / mean((w / mean(w))^2)``.
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

# SPDX-License-Identifier: Apache-2.0
"""Corrections with every loss that verl has, from the settings to the loss that a training worker calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn, register_policy_loss
from verl.utils.config import omega_conf_to_dataclass

from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.rules import algorithm
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.names import names
from recipe.async_engine.config.sections import read_settings
from recipe.async_engine.trainer.log_probs.losses import BYPASS, LOGLINEAR
from recipe.async_engine.trainer.verl_settings import derive_loss

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
OURS = {BYPASS, LOGLINEAR}
LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - OURS - {"bypass_mode"})
BETA = 0.3

GENERATOR = torch.Generator().manual_seed(3)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
SAMPLED = -torch.rand(3, 5, generator=GENERATOR) - 0.1
CURRENT = SAMPLED + 0.4 * torch.randn(3, 5, generator=GENERATOR)
ADVANTAGES = torch.randn(3, 5, generator=GENERATOR)
SHARES = torch.tensor([[0.0, 0.5, 0.5, 0.75, 0.8], [0.5, 0.5, 0.0, 0.0, 0.0], [0.75, 0.0, 0.0, 0.0, 0.0]])
Gradient = torch.Tensor


def configuration(mode: str, source: str, **correction: Any) -> Any:
    return OmegaConf.create(
        {
            "async_training": {"proximal_log_probs": source},
            "algorithm": {"rollout_correction": {"rollout_is_threshold": 2.0, "loss_type": "ppo_clip", **correction}},
            "actor_rollout_ref": {
                "actor": {
                    "_target_": "verl.workers.config.FSDPActorConfig",
                    "strategy": "fsdp2",
                    "rollout_n": 1,
                    "ppo_micro_batch_size_per_gpu": 1,
                    "policy_loss": {
                        "_target_": "verl.workers.config.PolicyLossConfig",
                        "loss_mode": mode,
                        "dro_beta": BETA,
                    },
                }
            },
        }
    )


def of(config: Any, mask: torch.Tensor, *, sampled: torch.Tensor = SAMPLED, weights: Any) -> tuple[float, Gradient]:
    """The loss of an actor's section and its gradient, as a training worker calls it."""
    actor = omega_conf_to_dataclass(config)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=9, global_batch_size=3)
    current = CURRENT.clone().requires_grad_()
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=sampled,
        log_prob=current,
        advantages=ADVANTAGES,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=actor,
        rollout_is_weights=weights,
    )
    loss.backward()
    return loss.item(), current.grad


def trained(mode: str, source: str, shares: torch.Tensor = SHARES, **correction: Any) -> tuple[float, Gradient]:
    """What a run with these settings trains with."""
    config = configuration(mode, source, **correction)
    derive_loss(config, Proximal(source))
    return of(config.actor_rollout_ref.actor, MASK, weights=shares if source == "loglinear" else None)


def plain(mode: str, mask: torch.Tensor, sampled: torch.Tensor, weights: Any = None) -> tuple[float, Gradient]:
    """verl's own loss of this name."""
    return of(configuration(mode, "bypass").actor_rollout_ref.actor, mask, sampled=sampled, weights=weights)


def assert_same(ours: tuple[float, Gradient], expected: tuple[float, Gradient]) -> None:
    assert ours[0] == pytest.approx(expected[0], abs=1e-6)
    assert torch.allclose(ours[1], expected[1], atol=1e-6)


def proximal() -> torch.Tensor:
    return SAMPLED + SHARES * (CURRENT - SAMPLED)


@pytest.mark.parametrize("mode", LOSSES)
def test_loss_without_a_correction_is_verls(mode: str) -> None:
    assert_same(trained(mode, "bypass"), plain(mode, MASK, SAMPLED))
    assert_same(trained(mode, "loglinear"), plain(mode, MASK, proximal()))


@pytest.mark.parametrize("mode", LOSSES)
def test_rejected_tokens_are_out_of_every_loss(mode: str) -> None:
    rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"}
    ratio = torch.exp(CURRENT - SAMPLED)
    kept = MASK * ((ratio >= 0.7) & (ratio <= 1.4))
    assert 0 < kept.sum() < MASK.sum()
    assert_same(trained(mode, "bypass", **rejection), plain(mode, kept, SAMPLED))
    ratio = torch.exp(proximal() - SAMPLED)
    kept = MASK * ((ratio >= 0.7) & (ratio <= 1.4))
    assert_same(trained(mode, "loglinear", **rejection), plain(mode, kept, proximal()))


@pytest.mark.parametrize("mode", LOSSES)
def test_weights_are_the_truncated_ratios_of_the_anchor_in_every_loss(mode: str) -> None:
    expected = (torch.exp(proximal() - SAMPLED) * MASK).clamp(max=1.2)
    assert (expected == 1.2).any()
    ours = trained(mode, "loglinear", rollout_is="token", rollout_is_threshold=1.2)
    assert_same(ours, plain(mode, MASK, proximal(), expected))
    assert ours[0] != pytest.approx(plain(mode, MASK, proximal())[0], abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["gpg", "dro", "reinforce"])
def test_loss_without_a_ratio_is_the_sum_of_its_weighted_terms(mode: str, level: str) -> None:
    log_ratio = CURRENT - SAMPLED
    if level == "sequence":
        log_ratio = (log_ratio * MASK).sum(-1, keepdim=True).expand_as(log_ratio)
    weights = torch.exp(log_ratio).clamp(max=1.5)
    current = CURRENT.clone().requires_grad_()
    terms = -current * ADVANTAGES
    if mode == "dro":
        terms = terms + 0.5 * BETA * (current - SAMPLED).square()
    expected = (weights * terms * MASK).sum() / 9
    expected.backward()
    named = {"loss_type": "reinforce"} if mode == "reinforce" else {}
    loss = "vanilla" if mode == "reinforce" else mode
    ours = trained(loss, "bypass", rollout_is=level, rollout_is_threshold=1.5, **named)
    assert_same(ours, (expected.item(), current.grad))


@pytest.mark.parametrize("mode", LOSSES)
def test_weights_of_one_change_no_loss(mode: str) -> None:
    fresh = torch.zeros_like(SHARES)
    assert_same(trained(mode, "loglinear", shares=fresh, rollout_is="token"), plain(mode, MASK, SAMPLED))


@pytest.mark.parametrize("mode", LOSSES)
def test_batch_whose_tokens_are_all_rejected_trains_nothing(mode: str) -> None:
    loss, gradient = trained(mode, "bypass", rollout_rs="token_k1", rollout_rs_threshold="0.999999_1.000001")
    assert loss == pytest.approx(0.0, abs=1e-6) and gradient.abs().sum() == 0


def test_loss_of_the_users_gets_weights_and_mask() -> None:
    seen = {}

    @register_policy_loss("of_a_user")
    def loss(*, response_mask: Any, log_prob: Any, rollout_is_weights: Any, **others: Any) -> Any:
        seen.update(mask=response_mask, weights=rollout_is_weights)
        return (log_prob * response_mask).sum(), {}

    try:
        trained("of_a_user", "bypass", rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4")
    finally:
        del POLICY_LOSS_REGISTRY["of_a_user"]
    ratio = torch.exp(CURRENT - SAMPLED)
    assert torch.equal(seen["mask"], MASK * ((ratio >= 0.7) & (ratio <= 1.4)))
    assert torch.allclose(seen["weights"], ratio.clamp(max=2.0) * MASK)


# What is refused, and what is said.


def judged(mode: str, source: str, **correction: Any) -> tuple[set[str], str]:
    settings = OmegaConf.to_container(configuration(mode, source, **correction))
    context = RuleContext(settings, read_settings(settings)[0], None, None, ())
    problems = [*algorithm.correction(context), *names(context)]
    return {problem.setting for problem in problems}, " ".join(algorithm.without_effect(context))


@pytest.mark.parametrize("mode", [*LOSSES, "bypass_mode"])
def test_weights_that_a_loss_would_not_apply_are_refused_or_said_to_have_no_effect(mode: str) -> None:
    refused, said = judged(mode, "bypass", rollout_is="token")
    of_ppo = mode in ("vanilla", "bypass_mode")
    assert refused == ({f"{CORRECTION}.rollout_is"} if algorithm.has_ratio(mode) and not of_ppo else set())
    assert bool(said) == of_ppo
    for settings in ({}, {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}):
        assert judged(mode, "bypass", **settings) == (set(), "")
    for source in ("recompute", "loglinear"):
        assert judged(mode, source, rollout_is="token") == (set(), "")


def test_loss_types_that_name_no_loss_or_a_second_one_are_refused() -> None:
    assert judged("vanilla", "bypass", loss_type="reinforce", rollout_is="token") == (set(), "")
    for mode, loss_type in (("vanilla", "ppo"), ("gspo", "reinforce"), ("vanilla", None)):
        assert judged(mode, "bypass", loss_type=loss_type)[0] == {f"{CORRECTION}.loss_type"}
        refused, _ = judged(mode, "recompute", loss_type=loss_type)
        assert bool(refused) == (loss_type == "ppo"), "a known one has no effect there"


@pytest.mark.parametrize("mode", LOSSES)
def test_losses_with_a_ratio_are_those_whose_gradient_goes_by_the_policy_that_sampled(mode: str) -> None:
    settings = configuration(mode, "bypass")
    # What is left of DRO is its gradient of the policy.
    settings.actor_rollout_ref.actor.policy_loss.dro_beta = 1e-9
    gradients = [
        of(settings.actor_rollout_ref.actor, MASK, sampled=CURRENT + shift, weights=None)[1] for shift in (0.0, 0.05)
    ]
    assert algorithm.has_ratio(mode) != torch.allclose(*gradients, atol=1e-6)

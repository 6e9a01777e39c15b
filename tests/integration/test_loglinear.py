# SPDX-License-Identifier: Apache-2.0
"""The losses of this package against their formulas."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig

from recipe.async_engine.trainer.log_probs.losses import BYPASS, LOGLINEAR, shares

GENERATOR = torch.Generator().manual_seed(0)
BEHAVE = -torch.rand(3, 5, generator=GENERATOR)
CURRENT = BEHAVE + 0.5 * torch.randn(3, 5, generator=GENERATOR)
ADVANTAGES = torch.randn(3, 5, generator=GENERATOR)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
VERSIONS = torch.tensor([[4, 4, 3, 3, 0], [2, 2, 4, -1, -1], [1, -1, -1, -1, -1]])


def actor(rollout_is: str | None = None) -> FSDPActorConfig:
    settings = {
        "_target_": "verl.workers.config.FSDPActorConfig",
        "strategy": "fsdp2",
        "rollout_n": 1,
        "ppo_micro_batch_size_per_gpu": 1,
        "policy_loss": {
            "_target_": "verl.workers.config.PolicyLossConfig",
            "rollout_correction": {"rollout_is": rollout_is, "rollout_is_threshold": 2.0, "loss_type": "ppo_clip"},
        },
    }
    return omega_conf_to_dataclass(OmegaConf.create(settings))


def test_anchor_moves_from_the_sampling_policy_to_the_current_one_with_staleness() -> None:
    assert shares(VERSIONS, 4).tolist()[0] == [0.0, 0.0, 0.5, 0.5, pytest.approx(0.8)]
    assert shares(VERSIONS, 4).tolist()[2] == [0.75, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("rollout_is", [None, "token"])
def test_loss_and_gradient_are_those_of_the_decoupled_loss_around_the_interpolated_policy(
    rollout_is: str | None,
) -> None:
    config, share = actor(rollout_is), shares(VERSIONS, 4)
    current = CURRENT.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(LOGLINEAR)(
        BEHAVE, current, ADVANTAGES, MASK, config=config, rollout_is_weights=share
    )
    loss.backward()
    age = (4 - VERSIONS).clamp(0, 4).float()
    proximal = (BEHAVE * 1 + CURRENT * age) / (age + 1)
    again = CURRENT.clone().requires_grad_()
    weights = None if rollout_is is None else (torch.exp(proximal - BEHAVE) * MASK).clamp(max=2.0)
    expected, _ = compute_policy_loss_vanilla(
        proximal, again, ADVANTAGES, MASK, config=config, rollout_is_weights=weights
    )
    expected.backward()
    assert torch.allclose(loss, expected, atol=1e-6)
    assert torch.allclose(current.grad, again.grad, atol=1e-6)
    assert current.grad.abs().sum() > 0
    ratios = torch.exp(proximal - BEHAVE)[MASK.bool()]
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((ratios - ratios.log() - 1).mean().item(), abs=1e-6)


def test_on_policy_tokens_have_the_sampling_policy_as_their_anchor() -> None:
    config, fresh = actor(), torch.zeros(3, 5)
    loss, _ = get_policy_loss_fn(LOGLINEAR)(BEHAVE, CURRENT, ADVANTAGES, MASK, config=config, rollout_is_weights=fresh)
    assert torch.equal(loss, compute_policy_loss_vanilla(BEHAVE, CURRENT, ADVANTAGES, MASK, config=config)[0])


def test_bypass_is_plain_ppo_that_reports_the_mismatch() -> None:
    config = actor()
    loss, metrics = get_policy_loss_fn(BYPASS)(BEHAVE, CURRENT, ADVANTAGES, MASK, config=config)
    expected, _ = compute_policy_loss_vanilla(BEHAVE, CURRENT, ADVANTAGES, MASK, config=config)
    assert torch.equal(loss, expected)
    ratios = torch.exp(CURRENT - BEHAVE)[MASK.bool()]
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(ratios.max().item())
    assert 0 < metrics["rollout_corr/rollout_is_eff_sample_size"] <= 1


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("rollout_rs", [None, "token_k1"])
@pytest.mark.parametrize("name", [BYPASS, LOGLINEAR])
def test_micro_batch_without_trainable_tokens_has_the_loss_0_and_the_metrics_of_the_others(
    name: str, rollout_rs: str | None, loss_type: str
) -> None:
    config = actor("token")
    correction = {"loss_type": loss_type, "rollout_rs": rollout_rs, "rollout_rs_threshold": "0.5_2.0"}
    config.policy_loss.rollout_correction.update(correction)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=9, global_batch_size=3)
    current, share = CURRENT.clone().requires_grad_(), shares(VERSIONS, 4)

    def loss_of(mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return get_policy_loss_fn(name)(BEHAVE, current, ADVANTAGES, mask, config=config, rollout_is_weights=share)

    loss, metrics = loss_of(torch.zeros_like(MASK))
    loss.backward()
    assert loss.item() == 0.0 and current.grad.abs().sum() == 0, "the other ranks wait for its gradient"
    assert metrics.keys() == loss_of(MASK)[1].keys(), "ranks with other keys cannot be averaged"
    assert all(value == value for value in metrics.values())

# SPDX-License-Identifier: Apache-2.0
"""Every estimator, loss, KL estimate and correction that verl has: what validation accepts runs with a batch of ours.

And what it refuses of them does not run, so that nothing is refused for nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    get_policy_loss_fn,
    kl_penalty,
)
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_rollout_correction_and_add_to_batch,
)
from verl.utils.config import omega_conf_to_dataclass

from recipe.async_engine.config.rules import algorithm, names
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import read_settings
from recipe.async_engine.trainer.log_probs.losses import BYPASS, LOGLINEAR

ACTOR = "actor_rollout_ref.actor"
GENERATOR = torch.Generator().manual_seed(0)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
SAMPLED = -torch.rand(4, 5, generator=GENERATOR)
PROXIMAL = SAMPLED + 0.1 * torch.randn(4, 5, generator=GENERATOR)
ADVANTAGES = torch.randn(4, 5, generator=GENERATOR)


def refused(**settings: Any) -> set[str]:
    """The settings that these rules refuse in a configuration with recompute as its source, but for what is given."""
    config = OmegaConf.create(
        {
            "async_training": {"proximal_log_probs": "recompute"},
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {"rollout": {"n": 2}},
            "critic": {"enable": None},
        }
    )
    for name, value in settings.items():
        OmegaConf.update(config, name, value, force_add=True)
    plain = OmegaConf.to_container(config)
    case = RuleContext(plain, read_settings(plain)[0], None, None, ())
    rules = (algorithm.advantages, algorithm.losses, algorithm.correction, names.names)
    return {problem.setting for rule in rules for problem in rule(case)}


def batch_of(settings: Mapping[str, Any]) -> DataProto:
    """As the trainer has it before the advantages, with a reward function that also returns ``style``."""
    scores = torch.zeros(4, 5)
    scores[torch.arange(4), MASK.sum(1) - 1] = torch.tensor([1.0, 0.0, 0.5, 1.0])
    tensors = {
        "prompts": torch.ones(4, 3, dtype=torch.int64),
        "responses": torch.ones(4, 5, dtype=torch.int64),
        "attention_mask": torch.cat([torch.ones(4, 3, dtype=torch.int64), MASK], 1),
        "response_mask": MASK,
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "rollout_log_probs": SAMPLED,
        "old_log_probs": PROXIMAL,
        "values": torch.rand(4, 5, generator=GENERATOR),
    }
    if settings.get(f"{ACTOR}.calculate_sum_pi_squared"):
        tensors["sum_pi_squared"] = torch.rand(4, 5, generator=GENERATOR)
    fields = {"uid": np.array(list("aabb"), dtype=object), "style": np.array([1.0, 0.0, 0.5, 0.0])}
    return DataProto.from_dict(tensors=tensors, non_tensors=fields)


def runs_advantages(estimator: str, settings: Mapping[str, Any]) -> bool:
    config = OmegaConf.create({"adv_estimator": estimator, "norm_adv_by_std_in_grpo": True, "gamma": 1.0, "lam": 1.0})
    config.gdpo_reward_keys = settings.get("algorithm.gdpo_reward_keys")
    try:
        batch = compute_advantage(batch_of(settings), estimator, 1.0, 1.0, 2, True, config)
    except (AssertionError, KeyError, TypeError, ValueError):
        return False
    return bool(torch.isfinite(batch.batch["advantages"][MASK.bool()]).all())


HELP = {
    "gdpo": {"algorithm.gdpo_reward_keys": ["style"]},
    "optimal_token_baseline": {f"{ACTOR}.calculate_sum_pi_squared": True},
    "tir_optimal_token_baseline": {f"{ACTOR}.calculate_sum_pi_squared": True},
}


@pytest.mark.parametrize("estimator", sorted(ADV_ESTIMATOR_REGISTRY))
def test_estimators_run_as_soon_as_nothing_is_refused(estimator: str) -> None:
    for settings in ({}, HELP.get(estimator, {})):
        accepted = not refused(**{"algorithm.adv_estimator": estimator}, **settings)
        assert accepted == runs_advantages(estimator, settings), settings
    assert accepted or estimator == "remax"


@pytest.mark.parametrize("source", ["bypass", "server", "loglinear"])
@pytest.mark.parametrize("estimator", algorithm.TOKEN_BASELINES)
def test_token_baselines_are_refused_where_the_trainer_does_not_compute(estimator: str, source: str) -> None:
    settings = {"algorithm.adv_estimator": estimator, "async_training.proximal_log_probs": source, **HELP[estimator]}
    assert refused(**settings) == {"async_training.proximal_log_probs"}


def actor(**policy_loss: Any) -> Any:
    settings = {
        "_target_": "verl.workers.config.FSDPActorConfig",
        "strategy": "fsdp2",
        "rollout_n": 2,
        "ppo_micro_batch_size_per_gpu": 1,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "policy_loss": {"_target_": "verl.workers.config.PolicyLossConfig", **copy.deepcopy(policy_loss)},
    }
    config = omega_conf_to_dataclass(OmegaConf.create(settings))
    # As verl's workers fill it in: of a whole mini-batch, of which a correction may reject every token here.
    config.global_batch_info.update(dp_size=1, batch_num_tokens=11, global_batch_size=4)
    return config


def runs_loss(mode: str, **policy_loss: Any) -> bool:
    current = PROXIMAL.clone().requires_grad_()
    try:
        loss, _ = get_policy_loss_fn(mode)(
            SAMPLED, current, ADVANTAGES, MASK, "token-mean", actor(**policy_loss), torch.zeros(4, 5)
        )
        loss.backward()
    except (AssertionError, KeyError, TypeError, ValueError):
        return False
    return bool(torch.isfinite(loss) and torch.isfinite(current.grad).all())


@pytest.mark.parametrize("mode", sorted(set(POLICY_LOSS_REGISTRY) - {BYPASS, LOGLINEAR}))
def test_losses_run_as_soon_as_nothing_is_refused(mode: str) -> None:
    name = f"{ACTOR}.policy_loss.loss_mode"
    source = {"async_training.proximal_log_probs": "bypass"} if mode == "bypass_mode" else {}
    for settings in ({}, {"dro_beta": 0.1}, {"dro_beta": 0.0}):
        given = {f"{ACTOR}.policy_loss.{key}": value for key, value in settings.items()}
        assert (not refused(**{name: mode}, **source, **given)) == runs_loss(mode, **settings), settings


def test_losses_that_follow_from_the_source_of_log_probs_are_refused_by_their_names() -> None:
    name = f"{ACTOR}.policy_loss.loss_mode"
    for mode in (BYPASS, LOGLINEAR, "bypass_mode"):
        assert refused(**{name: mode}) == {name}


@pytest.mark.parametrize("name", [*algorithm.KL_ESTIMATORS, "k3+", "low_var_kl+", "full", "k4", "+"])
def test_kl_estimates_that_are_accepted_are_verls(name: str) -> None:
    try:
        kl_penalty(PROXIMAL, SAMPLED, name)
        runs = True
    except NotImplementedError:
        runs = False
    in_loss = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": name}
    in_reward = {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": name}
    assert (not refused(**in_loss)) == (not refused(**in_reward)) == runs
    assert not refused(**{f"{ACTOR}.kl_loss_type": name}), "it is not used"


PRESETS = sorted(
    name
    for name, value in vars(RolloutCorrectionConfig).items()
    if isinstance(value, classmethod) and not name.startswith(("_", "from_"))
)
ALL_REJECTIONS: dict[str, Any] = {
    "rollout_rs": ",".join(algorithm.REJECTIONS),
    "rollout_rs_threshold": ",".join("0.5_2.0" if name.endswith("k1") else "2.0" for name in algorithm.REJECTIONS),
}
WRONG: list[dict[str, Any]] = [
    {"rollout_is": "group"},
    {"rollout_rs": "token_k4", "rollout_rs_threshold": 2.0},
    {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0},
    {"rollout_rs": "token_k1"},
]


@pytest.mark.parametrize("given", [*PRESETS, ALL_REJECTIONS, *WRONG], ids=str)
def test_corrections_that_are_accepted_run_in_the_trainer_and_in_the_losses(given: str | dict[str, Any]) -> None:
    preset = getattr(RolloutCorrectionConfig, given)() if isinstance(given, str) else RolloutCorrectionConfig(**given)
    correction = {key: value for key, value in asdict(preset).items() if key not in ("bypass_mode", "_target_")}
    accepted = not refused(**{f"algorithm.rollout_correction.{key}": value for key, value in correction.items()})
    assert accepted == (given not in WRONG)
    for loss in (BYPASS, LOGLINEAR):
        assert runs_loss(loss, rollout_correction=correction) == accepted, loss
    try:
        batch, _ = compute_rollout_correction_and_add_to_batch(batch_of({}), OmegaConf.create(correction))
        assert accepted and batch.batch["response_mask"].shape == MASK.shape
    except ValueError:
        assert not accepted


def test_rejections_are_verls() -> None:
    assert set(algorithm.REJECTIONS) == SUPPORTED_ROLLOUT_RS_OPTIONS
    assert PRESETS

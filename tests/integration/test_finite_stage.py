# SPDX-License-Identifier: Apache-2.0
"""What the trainer's stages do about NaN and infinities: verl's own advantages, losses and validation metrics."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto

from recipe.async_engine.core.alarms import Alarms
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.trainer.finite_stage import LEFT_OUT, leave_out
from recipe.async_engine.trainer.stages import TrainingFailed
from recipe.async_engine.trainer.verl_trainer import VerlTrainer

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])


def batch_of(**columns: torch.Tensor) -> DataProto:
    tensors = {"response_mask": MASK.clone(), **columns}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["a", "a", "b", "b"], dtype=object)})


class Stages(VerlTrainer):
    """verl's stages without its processes."""

    def __init__(self) -> None:
        self.metrics, self.timing_raw = {}, {}
        self.reward_tensor = torch.zeros(4, 3)
        self.reward_tensor[:, 0] = torch.tensor([1.0, 0.0, 1.0, 0.0])
        self.reward_extra_infos_dict = {}
        algorithm = {
            "use_kl_in_reward": False,
            "adv_estimator": "grpo",
            "gamma": 1.0,
            "lam": 1.0,
            "rollout_correction": {"bypass_mode": False, "rollout_is": "token", "rollout_is_threshold": 2.0},
        }
        rollout = {"n": 2}
        self.config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": rollout}})


class Trainer(AsyncPPOTrainer):
    """The loop around them."""

    stages: Stages

    def __init__(self) -> None:
        self.stages = Stages()
        self.metrics, self.alarms = self.stages.metrics, Alarms({})


def test_answer_with_a_number_that_is_none_is_left_out_and_the_others_are_as_they_were() -> None:
    log_probs = -torch.rand(4, 3)
    broken = log_probs.clone()
    broken[0, 1], broken[1, 2] = NAN, INF
    batch = batch_of(old_log_probs=broken, ref_log_prob=log_probs.clone())
    assert leave_out(batch, ("old_log_probs", "ref_log_prob", "values")) == 1
    assert batch.batch["response_mask"].tolist() == [[0, 0, 0], *MASK[1:].tolist()]
    assert batch.batch["response_mask"].dtype == MASK.dtype
    expected = log_probs.clone()
    expected[0], expected[1, 2] = 0.0, 0.0
    assert torch.equal(batch.batch["old_log_probs"], expected), "what nobody trains is no reason to leave one out"
    assert torch.equal(batch.batch["ref_log_prob"], log_probs * (torch.arange(4) > 0)[:, None])


def test_batch_in_which_every_answer_is_broken_ends_the_run_by_name() -> None:
    with pytest.raises(TrainingFailed, match="NaN or an infinity in its values"):
        leave_out(
            batch_of(old_log_probs=torch.zeros(4, 3), values=torch.full((4, 3), INF)), ("old_log_probs", "values")
        )


def test_advantages_and_weights_of_the_others_are_finite() -> None:
    trainer, sampled = Trainer(), -torch.rand(4, 3)
    computed = sampled.clone()
    computed[2, 0] = -INF
    batch = trainer._advantages(batch_of(old_log_probs=computed, rollout_log_probs=sampled))
    assert trainer.metrics[LEFT_OUT] == 1
    assert batch.batch["response_mask"].any(dim=1).tolist() == [True, True, False, True]
    for name in ("advantages", "rollout_is_weights", "old_log_probs"):
        assert torch.isfinite(batch.batch[name]).all(), name
    assert batch.batch["advantages"][0, 0] > 0 > batch.batch["advantages"][1, 0]
    assert all(value == value for value in trainer.metrics.values())


def test_reward_that_overflows_on_its_way_is_left_out_with_its_group() -> None:
    trainer = Trainer()
    trainer.stages.reward_tensor[0, 0] = INF
    batch = trainer._advantages(batch_of(old_log_probs=torch.zeros(4, 3), rollout_log_probs=torch.zeros(4, 3)))
    assert trainer.metrics[LEFT_OUT] == 2
    assert batch.batch["response_mask"].any(dim=1).tolist() == [False, False, True, True]


def validated(rewards: list[float], **fields: list[Any]) -> dict[str, float]:
    infos = defaultdict(list, {"reward": rewards, **fields})
    uids = ["a", "a", "b", "b"]
    return Stages()._val_metrics_update(np.array(["task"] * 4), uids, infos, [np.array([1, 1, 1, 1])])


def test_validation_scores_that_are_none_are_counted_and_their_prompts_left_out_of_the_mean() -> None:
    metrics = validated([1.0, NAN, 0.5, 0.5], style=[NAN] * 4)
    assert metrics["val-aux/num_failed"] == 1
    assert metrics["val-core/task/reward/mean@2"] == pytest.approx(0.5)
    metrics = validated([1.0] * 4, acc=[1.0, INF, 0.0, None])
    assert metrics["val-aux/num_failed"] == 1
    assert validated([1.0] * 4)["val-aux/num_failed"] == 0
    assert "val-core/task/reward/mean@2" not in validated([NAN] * 4)


def test_validation_takes_means_of_numbers_whatever_else_a_reward_reports() -> None:
    fields = {"steps": [[1, 2], [3], {"n": 1}, None], "note": [1.0, "x", None, "y"], "style": [1, None, True, 0.5]}
    metrics = validated([1.0] * 4, pred=["4", "5", "4", "4"], **fields)
    assert metrics["val-aux/task/style/mean@1"] == 1.0
    assert metrics["val-aux/task/style/mean@2"] == 0.75
    assert metrics["val-core/task/reward/maj@2/mean"] == 1.0
    assert not [name for name in metrics if "steps" in name or "note" in name]

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that stock's users have besides the regular ones' files: before an instance expires, and a callback's."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.trainer.save_stage import instance_expires, teller

EXPIRY = {name: f"{name}_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP" for name in ("MLP", "SAGEMAKER")}


def config(**trainer: Any) -> Any:
    return OmegaConf.create({"trainer": {"esi_redundant_time": 0, "save_freq": 5, **trainer}})


@pytest.mark.parametrize("cloud", EXPIRY)
def test_instance_expires_as_verl_says(cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not instance_expires(config(), 100.0), "nothing is said"
    monkeypatch.setenv(EXPIRY[cloud], str(int(time.time()) + 500))
    assert not instance_expires(config(), 100.0)
    assert instance_expires(config(), 600.0)
    assert instance_expires(config(esi_redundant_time=450), 100.0)


@pytest.mark.parametrize("cloud", EXPIRY)
def test_expiry_that_is_no_time_costs_no_run(
    cloud: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for said in ("tomorrow", "1e400", "-9" * 30):
        monkeypatch.setenv(EXPIRY[cloud], said)
        instance_expires(config(), 100.0)


@pytest.mark.parametrize(("save_freq", "expected"), [(5, ["save", "wait until it is complete"]), (-1, [])])
def test_step_before_the_expiry_is_saved_at_once_where_the_run_saves(
    save_freq: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXPIRY["MLP"], str(time.time() + 30))
    done: list[str] = []
    trainer = AsyncPPOTrainer.__new__(AsyncPPOTrainer)
    trainer.config, trainer.max_steps_duration = config(save_freq=save_freq), 2.0
    trainer.saving = SimpleNamespace(finish=lambda: done.append("wait until it is complete"))  # type: ignore[assignment]
    monkeypatch.setattr(trainer, "save_once", lambda: done.append("save"), raising=False)
    trainer._save_if_instance_expires()
    assert done == expected


class Told(CheckpointCallback):
    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any) -> None:
        trainer.append((global_step, checkpoint_dir, async_save, self.config.trainer.save_freq))


class Failing(CheckpointCallback):
    def on_save(self, **_: Any) -> None:
        raise OSError("the bucket is gone")


def test_callback_of_the_users_is_told_of_a_checkpoint_and_may_end_the_run(tmp_path: Path) -> None:
    told: list[Any] = []
    settings = config(default_local_dir=str(tmp_path))
    teller(settings, told)(3)
    assert told == [], "there is none"
    settings.trainer.checkpoint_callback_class = f"{__name__}.Told"
    teller(settings, told)(3)
    assert told == [(3, str(tmp_path / "global_step_3"), False, 5)]
    settings.trainer.checkpoint_callback_class = f"{__name__}.Failing"
    with pytest.raises(OSError, match="the bucket is gone"):
        teller(settings, told)(3)

# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is of one moment and is written beside training; what is due next, and the run's end, wait for it.

The stage, its thread, and the files are real; the scheduler's snapshot and verl's save are given.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from recipe.async_engine.config.sections import AsyncTraining
from recipe.async_engine.core.alarms import Alarms
from recipe.async_engine.core.errors import CheckpointError
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.trainer import checkpoints, rollout_state
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.trainer.checkpoints import MARKER, TRACKER, RunState
from recipe.async_engine.trainer.save_stage import SaveStage

SOON = 20.0


class Store:
    """Ray's object store, which hands nothing over until it may."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.on_thread: set[int] = set()

    def get(self, reference: str, timeout: float) -> torch.Tensor:
        self.asked.set()
        assert self.may_answer.wait(SOON)
        self.on_thread.add(threading.get_ident())
        return torch.tensor([int(reference)])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(rollout_state, "ray", store)
    return store


@dataclass
class Saving:
    """A run that is saved: the stage, and what the scheduler and verl would have of it."""

    root: Path
    stage: SaveStage
    told: list[int]
    payload: int = 1

    def begin(self, step: int) -> None:
        live = [[0, 0, 0, "0-0", 0, "ready", 1, None]]
        groups = {0: {"row": {}, "scored": ["score"], "payloads": [str(self.payload)], "kept": [None]}}
        snapshot = {"ledger": {"live": live}, "source": {"at": step}, "groups": groups}

        def save_verl() -> None:
            (checkpoints.folder_of(self.root, step) / "model.pt").write_text(str(threading.get_ident()))
            (self.root / TRACKER).write_text(str(step))

        self.stage.save(step, snapshot, save_verl)


def saving_in(root: Path, limit_s: float = SOON) -> Saving:
    told: list[int] = []
    config = {"default_local_dir": str(root), "save_freq": 1, "resume_mode": "auto"}
    plan: Any = SimpleNamespace(settings=SimpleNamespace(async_training=AsyncTraining()))
    saved = RunState(OmegaConf.create({"trainer": config}), plan, {})
    saved.find()
    return Saving(
        root, SaveStage(saved, Timeline(time.monotonic), limit_s, lambda what: nullcontext(), told.append), told
    )


def complete(root: Path, step: int) -> bool:
    return checkpoints.problem(checkpoints.folder_of(root, step)) is None


def test_training_goes_on_while_payloads_are_written_and_a_resumed_run_sees_the_moment_that_was_frozen(
    tmp_path: Path, store: Store
) -> None:
    saving = saving_in(tmp_path)
    saving.begin(2)
    assert store.asked.wait(SOON) and not saving.stage.is_over
    folder = tmp_path / "global_step_2"
    assert (folder / "model.pt").read_text() == str(threading.get_ident()), "verl's save is the trainer's own"
    assert not (folder / MARKER).exists() and not (tmp_path / TRACKER).exists()
    store.may_answer.set()
    assert saving.told == []
    saving.stage.finish()
    assert saving.told == [2], "when it is complete"
    assert complete(tmp_path, 2) and (tmp_path / TRACKER).read_text() == "2"
    assert store.on_thread.isdisjoint({threading.get_ident()})
    loaded = rollout_state.load(str(folder))
    assert loaded["groups"][0]["payloads"] == [torch.tensor([1])]
    assert loaded["source"] == {"at": 2}


def test_late_one_ends_the_run_by_its_deadline_and_leaves_nothing_that_is_taken_for_complete(
    tmp_path: Path, store: Store
) -> None:
    saving = saving_in(tmp_path, limit_s=0.2)
    saving.begin(2)
    assert store.asked.wait(SOON)
    with pytest.raises(CheckpointError, match=r"step 2 was not written within 0\.2 s \(async_training\.timeouts\."):
        saving.stage.finish()
    assert not (tmp_path / "global_step_2" / MARKER).exists()
    store.may_answer.set()


def test_one_that_fails_is_told_at_the_next_step_with_its_own_error_and_costs_no_other(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.may_answer.set()
    saving = saving_in(tmp_path)
    saving.begin(2)
    saving.stage.finish()

    def full(*_: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(rollout_state.torch, "save", full)
    saving.begin(4)
    while not saving.stage.is_over:
        pass
    with pytest.raises(OSError, match="no space left"):
        saving.stage.finish()
    assert complete(tmp_path, 2) and (tmp_path / TRACKER).read_text() == "2"
    assert not (tmp_path / "global_step_4").exists()
    saving.begin(6)
    saving.stage.complete()  # of a run that fails: its own error is the one to report
    assert not saving.stage.is_over and complete(tmp_path, 2)
    assert saving.told == [2]


class Trainer(AsyncPPOTrainer):
    """A trainer whose stages say in ``done`` what they do, and have no processes."""

    def __init__(self, done: list[str]) -> None:
        self.done = done
        self.config = OmegaConf.create({"trainer": {"save_freq": 1, "test_freq": 1}})
        self.ledger: Any = SimpleNamespace(version=0, batches_left=0)
        self.plan: Any = SimpleNamespace(batches_per_version=1)
        self.metrics, self.timing_raw = {}, {}
        self.timeouts: Any = SimpleNamespace(checkpoint=SOON)
        self.timeline = Timeline(time.monotonic)
        self.global_steps, self.is_last_step, self._validated_at = 1, False, -1
        self.alarms, self.validation = Alarms({}), {"last": 0.5}
        self.alarms.note("skipped_updates", True)
        self.publishing: Any = SimpleNamespace(
            seal=self.seal, send=lambda *_: done.append("send"), finish=lambda metrics: None
        )
        self.saving: Any = SimpleNamespace(save=self.save, finish=lambda: done.append("wait for the last one"), step=-1)
        self.scheduler: Any = SimpleNamespace(snapshot=lambda timeout_s: {"groups": {}})

    def seal(self, *_: Any) -> None:
        self.done.append("seal")
        self.ledger.version, self.ledger.batches_left = 1, 1

    def save(self, step: int, snapshot: dict[str, Any], save_training_side: Any) -> None:
        self.saving.step, self.snapshot = step, snapshot
        self.done.append("save")

    def _validate_now(self) -> dict[str, float]:
        self.done.append("validate")
        return {}


def test_next_one_waits_for_the_one_under_way_and_has_the_results_so_far_as_they_were() -> None:
    trainer = Trainer(done := [])
    trainer.save_once()
    trainer.save_once()
    assert done == ["wait for the last one", "save"], "a step is saved once"
    trainer.validation["last"] = 0.9
    trainer.alarms.note("skipped_updates", True)
    assert trainer.snapshot == {
        "groups": {},
        "validation": {"last": 0.5},
        "alarms": {"skipped_updates": 1},
    }


def test_a_version_is_saved_when_it_is_sent_and_before_its_validation() -> None:
    trainer = Trainer(done := [])
    trainer._publish()
    trainer._save_and_validate()
    assert done == ["seal", "send", "wait for the last one", "save", "validate"]

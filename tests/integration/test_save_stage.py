# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is of one moment and is written beside training; what is due next, and the run's end, wait for it.

The stage, its thread, and the files are real; the scheduler's snapshot and verl's save are given.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from recipe.async_engine.settings.sections import AsyncTraining
from recipe.async_engine.trainer import checkpoints, rollout_state, save_stage
from recipe.async_engine.trainer.checkpoints import MARKER, TRACKER, CheckpointTimeout, RunState
from recipe.async_engine.trainer.save_stage import SaveStage, new_saving
from recipe.partial_rollout.trainer import PartialRolloutTrainer

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


def trainer_in(root: Path, store: Store, limit_s: float = SOON) -> Any:
    """The stage of a trainer that has nothing else."""
    trainer = object.__new__(SaveStage)
    config = {"default_local_dir": str(root), "save_freq": 1, "resume_mode": "auto"}
    trainer.config = OmegaConf.create({"trainer": config})
    trainer.timeouts = SimpleNamespace(checkpoint=limit_s)
    trainer.plan = SimpleNamespace(settings=SimpleNamespace(async_training=AsyncTraining()), batches_per_version=1)
    trainer.saved = RunState(trainer.config, trainer.plan, {})
    trainer.saved.find()
    trainer.saving = new_saving(limit_s)
    trainer.timeline = SimpleNamespace(phase=lambda name: nullcontext())
    trainer._watch = SimpleNamespace(within=lambda *words: nullcontext())
    trainer.unchanged, trainer.skipped_updates = SimpleNamespace(total=0), {}
    trainer.validation, trainer.timing_raw = {"first": 0.5, "last": 0.5}, {}
    trainer.ledger = SimpleNamespace(batches_left=1, version=1)
    trainer._saved_at, trainer.global_steps, trainer.is_last_step = -1, 0, False
    trainer._finish_publication = lambda: None
    trainer.payload = 1

    def snapshot(timeout_s: float) -> dict[str, Any]:
        live = [[0, 0, 0, "0-0", 0, "ready", 1, None]]
        groups = {0: {"row": {}, "scored": ["score"], "payloads": [str(trainer.payload)], "kept": [None]}}
        return {"ledger": {"live": live}, "source": {"at": trainer.global_steps}, "groups": groups}

    def save_verl() -> None:
        folder = checkpoints.folder_of(root, trainer.global_steps)
        (folder / "model.pt").write_text(str(threading.get_ident()))
        (root / TRACKER).write_text(str(trainer.global_steps))

    class Running(SaveStage):
        running = SimpleNamespace(snapshot=snapshot)
        _save_training_side = staticmethod(save_verl)

    trainer.__class__ = Running
    return trainer


def begin(trainer: Any, step: int) -> None:
    trainer.global_steps = step
    trainer._save_once()


def complete(root: Path, step: int) -> bool:
    return checkpoints.problem(checkpoints.folder_of(root, step)) is None


def test_training_goes_on_while_payloads_are_written_and_a_resumed_run_sees_the_moment_that_was_frozen(
    tmp_path: Path, store: Store
) -> None:
    trainer = trainer_in(tmp_path, store)
    begin(trainer, 2)
    assert store.asked.wait(SOON) and not trainer.saving.is_over
    folder = tmp_path / "global_step_2"
    assert (folder / "model.pt").read_text() == str(threading.get_ident()), "verl's save is the trainer's own"
    assert not (folder / MARKER).exists() and not (tmp_path / TRACKER).exists()
    # What the trainer does meanwhile is not in it.
    trainer.validation["last"], trainer.payload, trainer.global_steps = 0.9, 7, 3
    store.may_answer.set()
    trainer._finish_saving()
    assert complete(tmp_path, 2) and (tmp_path / TRACKER).read_text() == "2"
    assert store.on_thread.isdisjoint({threading.get_ident()})
    loaded = rollout_state.load(str(folder))
    assert loaded["groups"][0]["payloads"] == [torch.tensor([1])]
    assert (loaded["source"], loaded["validation"]) == ({"at": 2}, {"first": 0.5, "last": 0.5})


def test_next_one_waits_for_the_one_under_way(tmp_path: Path, store: Store) -> None:
    trainer = trainer_in(tmp_path, store)
    begin(trainer, 2)
    assert store.asked.wait(SOON)
    second = threading.Thread(target=begin, args=(trainer, 4))
    second.start()
    second.join(0.05)
    assert second.is_alive() and not (tmp_path / "global_step_4").exists()
    store.may_answer.set()
    second.join(SOON)
    assert complete(tmp_path, 2)
    trainer._finish_saving()
    assert complete(tmp_path, 4) and not (tmp_path / "global_step_2" / "begun").exists()


def test_late_one_ends_the_run_by_its_deadline_and_leaves_nothing_that_is_taken_for_complete(
    tmp_path: Path, store: Store
) -> None:
    trainer = trainer_in(tmp_path, store, limit_s=0.2)
    begin(trainer, 2)
    assert store.asked.wait(SOON)
    with pytest.raises(CheckpointTimeout, match=r"step 2 was not written within 0\.2 s \(async_training\.timeouts\."):
        trainer._finish_saving()
    assert not (tmp_path / "global_step_2" / MARKER).exists()
    store.may_answer.set()


def test_one_that_fails_is_told_at_the_next_step_with_its_own_error_and_costs_no_other(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.may_answer.set()
    trainer = trainer_in(tmp_path, store)
    begin(trainer, 2)
    trainer._finish_saving()

    def full(*_: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(rollout_state.torch, "save", full)
    begin(trainer, 4)
    while not trainer.saving.is_over:
        pass
    with pytest.raises(OSError, match="no space left"):
        trainer._finish_saving()
    assert complete(tmp_path, 2) and (tmp_path / TRACKER).read_text() == "2"
    assert not (tmp_path / "global_step_4").exists()
    begin(trainer, 6)
    trainer._complete_saving()  # of a run that fails: its own error is the one to report
    assert not trainer.saving.is_over and complete(tmp_path, 2)


@pytest.mark.parametrize("stopped_by", [None, "SIGTERM"])
def test_partial_rollout_saves_a_version_before_the_engines_have_its_weights(stopped_by: str | None) -> None:
    done: list[str] = []

    class Trainer(PartialRolloutTrainer):
        def __init__(self) -> None:
            self.config = OmegaConf.create({"trainer": {"save_freq": 1 if stopped_by is None else 100, "test_freq": 1}})
            self.ledger = SimpleNamespace(version=0, batches_left=0)
            self.plan = SimpleNamespace(
                batches_per_version=1, settings=SimpleNamespace(weights=SimpleNamespace(publish="inline"))
            )
            self.metrics, self.timing_raw = {}, {}
            self.global_steps, self.is_last_step, self._saved_at, self._validated_at = 1, False, -1, -1
            self.stopped_by, self.timeline = stopped_by, SimpleNamespace(phase=lambda name: nullcontext())
            self.publisher = SimpleNamespace(is_awake=False, begin_generation=lambda: None, pause=lambda: None)
            self.published = SimpleNamespace(keep=lambda: None)
            self.unchanged = SimpleNamespace(seal=lambda version: None)
            self.fleet = SimpleNamespace(snapshot=lambda version: done.append("seal"))
            self.publication = SimpleNamespace(begin=lambda version, work: done.append("wake the engines"))
            self.publication.wait = lambda: None

            def version_sealed() -> None:
                self.ledger.version, self.ledger.batches_left = 1, 1

            self.scheduler = SimpleNamespace(version_sealed=version_sealed)

        def _finish_saving(self) -> None:
            pass

        def _validate_now(self) -> dict[str, float]:
            done.append("validate")
            return {}

    Trainer._save_training_side = lambda self: None  # type: ignore[method-assign]
    trainer = Trainer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_stage.SaveStage, "_save_checkpoint", lambda self: done.append("save"))
        trainer._end_version()
        assert done == ["seal", "save", "wake the engines", "validate"]
        # The last save of a run that ends without a further version: its engines have weights, and give them back.
        trainer.publisher.is_awake, trainer.publisher.release = True, lambda: done.append("free the engines")
        trainer.global_steps += 1
        trainer._save_once()
    assert done[4:] == ["free the engines", "save"]

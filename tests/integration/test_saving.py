# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a start goes on from, by `trainer.resume_mode`, and what becomes of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpointed import plan, snapshot
from omegaconf import OmegaConf

from recipe.async_engine.core.errors import CheckpointError
from recipe.async_engine.record.owner import FolderTaken
from recipe.async_engine.trainer import checkpoints
from recipe.async_engine.trainer.checkpoints import MARKER, ROLLOUT_STATE, TRACKER, RunState


def run_state(root: Path, **trainer: Any) -> RunState:
    config = {"default_local_dir": str(root), "save_freq": 1, "resume_mode": "auto"} | trainer
    return RunState(OmegaConf.create({"trainer": config}), plan(), {})


def save(state: RunState, step: int) -> None:
    state.save(step, snapshot(unchanged_versions=step), lambda: None)()


def saved(root: Path, *steps: int) -> None:
    state = run_state(root)
    for step in steps:
        save(state, step)


def names(root: Path) -> list[str]:
    return sorted(name.removeprefix("global_step_") for name in os.listdir(root) if name.startswith("global_step_"))


def unreadable(root: Path, step: int) -> None:
    """A complete checkpoint whose rollout side nobody can unpickle."""
    folder = checkpoints.folder_of(root, step)
    (folder / ROLLOUT_STATE).write_bytes(b"not what torch writes")
    (folder / MARKER).unlink()
    checkpoints.commit(root, step)


def test_checkpoint_whose_rollout_side_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    unreadable(tmp_path, 4)
    state = run_state(tmp_path)
    assert state.find() == str(tmp_path / "global_step_2")
    assert state.resumed["step"] == 2
    found = state.load(SimpleNamespace(restore=lambda position: None))
    assert found is not None and found["unchanged_versions"] == 2
    assert (tmp_path / TRACKER).read_text() == "2"


def test_start_is_refused_where_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    for step in (2, 4):
        unreadable(tmp_path, step)
    with pytest.raises(CheckpointError, match=r"global_step_4: .*rollout_state.*global_step_2: .*resume_mode=disable"):
        run_state(tmp_path).find()
    assert names(tmp_path) == ["2", "4"]


def test_checkpoint_that_is_named_by_its_path_is_the_one_or_the_start_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saved(root, 2, 4, 6)
    named = {"resume_mode": "resume_path", "resume_from_path": str(root / "global_step_4")}
    assert run_state(root, **named).find() == str(root / "global_step_4")
    # Nothing is renamed before the run saves: it may only be a validation.
    assert (names(root), (root / TRACKER).read_text()) == (["2", "4", "6"], "6")
    unreadable(root, 4)
    with pytest.raises(CheckpointError, match=r"trainer\.resume_from_path=.*cannot be used: .*rollout_state"):
        run_state(root, **named).find()
    with pytest.raises(CheckpointError, match="there is no such folder"):
        run_state(root, **named | {"resume_from_path": str(tmp_path / "global_step_9")}).find()


def test_later_checkpoints_keep_other_names_once_a_run_that_went_back_saves(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6)
    state = run_state(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_2"))
    state.find()
    save(state, 4)
    assert names(tmp_path) == ["2", "4", "4.aside1", "6.aside1"]
    assert run_state(tmp_path).find() == str(tmp_path / "global_step_4")


def test_all_of_a_folders_checkpoints_are_of_another_history_for_a_run_from_elsewhere(tmp_path: Path) -> None:
    saved(tmp_path / "other", 4)
    saved(tmp_path / "run", 2, 6)
    other = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "other" / "global_step_4")}
    state = run_state(tmp_path / "run", **other)
    state.find()
    save(state, 6)
    assert names(tmp_path / "run") == ["2.aside1", "6", "6.aside1"]


def test_run_that_begins_anew_renames_what_is_there_when_it_saves(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    state = run_state(tmp_path, resume_mode="disable")
    assert state.find() is None
    assert names(tmp_path) == ["2"]
    save(state, 2)
    assert names(tmp_path) == ["2", "2.aside1"]


def test_committed_checkpoint_is_not_written_again_by_the_run_that_resumed_from_it(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.name != "run.lock"}
    state = run_state(tmp_path)
    state.find()
    save(state, 2)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.name != "run.lock"} == before


def test_failed_save_leaves_the_checkpoint_before_and_verl_removes_none(tmp_path: Path) -> None:
    state = run_state(tmp_path, max_actor_ckpt_to_keep=1, remove_previous_ckpt_in_save=True)
    save(state, 2)
    seen: list[dict[str, Any]] = []

    def save_verl() -> None:
        seen.append(dict(state._trainer))
        (tmp_path / TRACKER).write_text("4")
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        state.save(4, {"ledger": {"live": []}, "groups": {}}, save_verl)
    # verl itself would have removed the checkpoint before.
    assert not seen[0]["remove_previous_ckpt_in_save"]
    assert seen[0]["max_actor_ckpt_to_keep"] is None
    assert (names(tmp_path), (tmp_path / TRACKER).read_text()) == (["2"], "2")
    save(state, 4)
    assert names(tmp_path) == ["4"]


HOLDER = """
import sys, time
from recipe.async_engine.record.owner import CHECKPOINTS, Owner
owner = Owner(sys.argv[1], CHECKPOINTS)
print("has it", flush=True)
time.sleep(60)
"""


def test_start_waits_for_the_trainer_of_an_earlier_one_and_then_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 2)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "has it\n"
        monkeypatch.setattr(checkpoints, "EARLIER_RUN_S", 0.3)
        with pytest.raises(FolderTaken, match="the trainer of an earlier start, which has not ended yet"):
            run_state(tmp_path).find()
    finally:
        holder.kill()
        holder.wait()
    assert run_state(tmp_path).find() == str(tmp_path / "global_step_2")

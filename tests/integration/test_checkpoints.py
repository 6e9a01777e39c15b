# SPDX-License-Identifier: Apache-2.0
"""A checkpoint counts when every file of it is there; what was cut off goes, what is complete is not written again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipe.async_engine.core.errors import CheckpointError
from recipe.async_engine.record.durable import REMOVED
from recipe.async_engine.trainer import checkpoints
from recipe.async_engine.trainer.checkpoints import MARKER, TRACKER, candidates, problem

FILES = ("rollout_state.pt", "data.pt", "actor/model.pt", "actor/huggingface/config.json")


def write(root: Path, step: int, committed: bool = True) -> Path:
    folder = checkpoints.folder_of(root, step)
    (folder / "actor" / "huggingface").mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(name)
    if committed:
        checkpoints.commit(root, step)
    return folder


def track(root: Path, text: str) -> None:
    (root / TRACKER).write_text(text)


def steps_in(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith("global_step"))


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("8", [8, 4, 2]),
        ("4", [4, 2, 8]),  # taken back by the user
        ("", [8, 4, 2]),
        ("6", [4, 2, 8]),
        ("9", [8, 4, 2]),
        ("²", [8, 4, 2]),
    ],
)
def test_checkpoint_of_the_tracker_is_tried_first_then_older_ones_then_newer_ones(
    tmp_path: Path, text: str, order: list[int]
) -> None:
    for step in (2, 4, 8):
        write(tmp_path, step)
    write(tmp_path, 6, committed=False)
    track(tmp_path, text)
    assert candidates(tmp_path) == order


def test_checkpoint_that_is_committed_is_what_the_tracker_names(tmp_path: Path) -> None:
    track(tmp_path, "")
    write(tmp_path, 4)
    assert (tmp_path / TRACKER).read_text() == "4"


@pytest.mark.parametrize("name", FILES)
def test_checkpoint_that_lost_a_file_at_any_depth_or_a_part_of_one_is_not_complete(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, 4)
    assert problem(folder) is None
    (folder / name).write_text(name[::-1])
    assert problem(folder) == f"{name} has another content than was saved"
    (folder / name).write_text(name[1:])
    assert problem(folder) == f"{name} has {len(name) - 1} bytes of {len(name)}"
    (folder / name).unlink()
    assert problem(folder) == f"{name} is missing"


@pytest.mark.parametrize(
    "marker", [b"", b"{", b"[]", b'{"files": [1]}', b'{"files": {"data.pt": 7}}', b"\xff\x00", b"null"]
)
def test_marker_that_is_damaged_in_any_way_makes_the_checkpoint_incomplete(tmp_path: Path, marker: bytes) -> None:
    folder = write(tmp_path, 4)
    (folder / MARKER).write_bytes(marker)
    assert f"the checkpoint's {MARKER} cannot be read" in str(problem(folder))


def test_checkpoint_of_another_trainer_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    track(tmp_path, "3")
    with pytest.raises(CheckpointError, match=r"no rollout_state\.pt.*trainer\.resume_mode=disable"):
        candidates(tmp_path)
    checkpoints.clear(tmp_path)
    assert (steps_in(tmp_path), (tmp_path / TRACKER).read_text()) == (["global_step_3"], "3")
    checkpoints.require_room(tmp_path, after=3)
    with pytest.raises(CheckpointError, match=r"those of another trainer.*global_step_3.*Move them"):
        checkpoints.require_room(tmp_path, after=2)


def test_what_was_cut_off_while_it_was_written_or_removed_is_removed_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 2)
    write(tmp_path, 4, committed=False)
    (tmp_path / "global_step_6").mkdir()
    (tmp_path / "global_step_8").mkdir()
    (tmp_path / "global_step_8" / "rollout_state.pt.partial").write_text("half")
    write(tmp_path, 1).rename(tmp_path / f"global_step_1{REMOVED}")
    (tmp_path / "global_step_old").mkdir()
    checkpoints.clear(tmp_path)
    assert steps_in(tmp_path) == ["global_step_2", "global_step_old"]


def test_checkpoints_of_another_history_are_kept_under_other_names(tmp_path: Path) -> None:
    for _ in range(2):
        for step in (2, 4, 6):
            if not checkpoints.folder_of(tmp_path, step).exists():
                write(tmp_path, step)
        checkpoints.set_aside(tmp_path, after=2)
    kept = [f"global_step_{step}.aside{number}" for step in (4, 6) for number in (1, 2)]
    assert steps_in(tmp_path) == ["global_step_2", *kept]
    assert [problem(tmp_path / name) for name in kept] == [None] * 4
    assert candidates(tmp_path) == [2]


@pytest.mark.parametrize(("count", "left"), [(None, [2, 4, 6, 8]), (1, [6, 8]), (2, [4, 6, 8]), (9, [2, 4, 6, 8])])
def test_old_checkpoints_go_when_a_newer_one_is_committed(tmp_path: Path, count: int | None, left: list[int]) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    checkpoints.retain(tmp_path, 6, count)
    assert [step for step in (2, 4, 6, 8) if checkpoints.folder_of(tmp_path, step).exists()] == left


def test_retention_counts_complete_checkpoints_only_and_removes_no_other(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
    (tmp_path / "global_step_4" / "data.pt").unlink()
    checkpoints.retain(tmp_path, 6, 2)
    assert steps_in(tmp_path) == ["global_step_2", "global_step_4", "global_step_6"]

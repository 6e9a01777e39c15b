# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""A checkpoint counts when it is complete; verl's tracker ends up naming such a one, whatever a kill left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipe.async_engine.trainer import checkpoints
from recipe.async_engine.trainer.checkpoints import MARKER, TRACKER, CheckpointError, settle


def write(root: Path, step: int, committed: bool = True, at: int = 0) -> Path:
    folder = checkpoints.folder_of(root, step)
    (folder / "actor").mkdir(parents=True)
    for name in ("rollout_state.pt", "data.pt", "actor/model.pt"):
        (folder / name).write_text(name)
    if committed:
        checkpoints.commit(folder, step)
        os.utime(folder / MARKER, (1_000_000 + (at or step),) * 2)
    return folder


def track(root: Path, text: str) -> None:
    (root / TRACKER).write_text(text)


def test_tracker_that_names_a_complete_checkpoint_stays(tmp_path: Path) -> None:
    write(tmp_path, 2)
    write(tmp_path, 4)
    track(tmp_path, "2")  # taken back by the user, perhaps
    assert settle(tmp_path) == 2
    assert (tmp_path / TRACKER).read_text() == "2"


@pytest.mark.parametrize("text", ["", "6", "9"])
def test_tracker_that_was_cut_off_or_names_an_incomplete_one_is_set_to_the_newest_complete_one(
    tmp_path: Path, text: str
) -> None:
    write(tmp_path, 2)
    write(tmp_path, 4)
    write(tmp_path, 6, committed=False)
    track(tmp_path, text)
    assert settle(tmp_path) == 4
    assert (tmp_path / TRACKER).read_text() == "4"


def test_newest_is_the_one_written_last_not_the_one_of_the_highest_step(tmp_path: Path) -> None:
    write(tmp_path, 8, at=1)
    write(tmp_path, 4, at=2)
    track(tmp_path, "")
    assert settle(tmp_path) == 4


def test_without_a_complete_checkpoint_the_run_starts_from_the_beginning(tmp_path: Path) -> None:
    assert settle(tmp_path) is None
    write(tmp_path, 1, committed=False)
    track(tmp_path, "1")
    assert settle(tmp_path) is None
    assert not (tmp_path / TRACKER).exists()


def test_checkpoint_of_another_trainer_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    track(tmp_path, "3")
    with pytest.raises(CheckpointError, match=r"no rollout_state\.pt.*trainer\.resume_mode=disable"):
        settle(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "3"


def test_folder_that_is_written_again_is_no_checkpoint_meanwhile(tmp_path: Path) -> None:
    folder = write(tmp_path, 4)
    assert checkpoints.is_committed(folder)
    checkpoints.begin(folder)
    assert not checkpoints.is_committed(folder)
    with pytest.raises(CheckpointError, match=r"trainer\.resume_from_path=.*cut off"):
        checkpoints.require_committed(folder)


def test_checkpoint_that_lost_a_file_or_a_part_of_one_is_not_complete(tmp_path: Path) -> None:
    folder = write(tmp_path, 4)
    (folder / "data.pt").write_text("da")
    assert not checkpoints.is_committed(folder)
    (folder / "data.pt").unlink()
    assert not checkpoints.is_committed(folder)


@pytest.mark.parametrize(("count", "left"), [(None, [2, 4, 6, 8]), (1, [6, 8]), (2, [4, 6, 8]), (9, [2, 4, 6, 8])])
def test_old_checkpoints_go_when_a_newer_one_is_committed(tmp_path: Path, count: int | None, left: list[int]) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    checkpoints.retain(tmp_path, 6, count)
    assert [step for step in (2, 4, 6, 8) if checkpoints.folder_of(tmp_path, step).exists()] == left

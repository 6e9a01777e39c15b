# SPDX-License-Identifier: Apache-2.0
"""Each mode rehearses and trains on accelerators: in turns on one, apart on two; killed, it goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from short_modes import rehearse, run_apart, run_in_turns_killed_and_resumed

from recipe.laptop.task import TaskPaths, TaskSettings, ensure_task


@pytest.fixture(scope="module")
def task(accelerators: int, tmp_path_factory: pytest.TempPathFactory) -> TaskPaths:
    return ensure_task(tmp_path_factory.mktemp("task") / "task", TaskSettings(train_size=256, val_size=32))


def test_rehearsal_on_one_accelerator(task: TaskPaths, tmp_path: Path, ray_dir: Path, note: Any) -> None:
    note(**rehearse("cuda", "partial_rollout", task, tmp_path, ray_dir))


@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
def test_rehearsal_on_two_accelerators(
    two_accelerators: int, mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path, note: Any
) -> None:
    note(**rehearse("cuda", mode, task, tmp_path, ray_dir))


def test_turns_on_one_accelerator_killed_and_resumed(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch, note: Any
) -> None:
    note(**run_in_turns_killed_and_resumed("cuda", task, tmp_path, ray_dir, monkeypatch))


@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
def test_apart_on_two_accelerators(
    two_accelerators: int, mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path, note: Any
) -> None:
    note(**run_apart("cuda", mode, task, tmp_path, ray_dir))

# SPDX-License-Identifier: Apache-2.0
"""The runs that tests/gpu does on accelerators, on a CPU: what is tested there has run before."""

from __future__ import annotations

from pathlib import Path

import pytest
from short_modes import rehearse, run_apart, run_in_turns_killed_and_resumed

from recipe.laptop.task import TaskPaths

pytestmark = pytest.mark.vllm("the runs on accelerators name their engine")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
def test_apart(mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    assert run_apart("cpu", mode, task, tmp_path, ray_dir)["seconds_of_last_sync"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_turns_killed_and_resumed(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = run_in_turns_killed_and_resumed("cpu", task, tmp_path, ray_dir, monkeypatch)
    assert figures["seconds_a_step"] > 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fully_async", "one_step_off", "partial_rollout"])
def test_rehearsal(mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    assert rehearse("cpu", mode, task, tmp_path, ray_dir)["difference_of_log_probs"] < 1e-5

# SPDX-License-Identifier: Apache-2.0
"""A part that accepts and never answers (SIGSTOP): the run ends in time and names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import run_main, small
from surroundings import has_ended

from recipe.laptop.task import TaskPaths

END_S = 60.0


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "timeouts", "named"),
    [
        # The only server: nobody generates, and the sync that pauses it waits.
        ("server", {"stall": 10, "weight_sync": 200}, "rollout server 0 DOES NOT ANSWER"),
        ("receiver", {"stall": 100, "weight_sync": 10}, "NoReplicaLeft: no rollout replica holds version"),
    ],
)
def test_part_that_never_answers_is_named_and_ends_the_run(
    part: str,
    timeouts: dict[str, int],
    named: str,
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STOP_AT_STEP", "3")
    monkeypatch.setenv("STOP_PART", part)
    monkeypatch.setenv("STOP_PID_FILE", str(tmp_path / "pid"))
    overrides = [
        *small(task, tmp_path, ray_dir),
        *(f"async_training.timeouts.{name}={seconds}" for name, seconds in timeouts.items()),
        "trainer.total_training_steps=1000",
    ]
    run = run_main("fully_async:stopping_trainer.StoppingTrainer", overrides, tmp_path, shared=False)
    assert run.returncode == 1
    assert named in run.output
    error = run.summary["error"]
    assert f"{error['name']}: {error['message']}".count(named) >= 1
    last_step = (tmp_path / "metrics.jsonl").stat().st_mtime
    assert (tmp_path / "summary.json").stat().st_mtime - last_step < END_S
    # A stopped process does not notice that the others have ended.
    assert has_ended(int((tmp_path / "pid").read_text()))

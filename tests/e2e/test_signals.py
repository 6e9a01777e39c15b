# SPDX-License-Identifier: Apache-2.0
"""A run that gets SIGTERM ends with a checkpoint, from which the next one goes on; a second signal ends it at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from drilled_run import DrilledRun, drilled
from main_runs import FULLY_ASYNC, FinishedRun, small

from recipe.async_engine.task import TaskPaths

END_S, AT_ONCE_S = 60.0, 30.0


def end(run: DrilledRun, numbers: list[int], timeout_s: float) -> FinishedRun:
    """The run after these signals."""
    for number in numbers:
        # A terminal's Ctrl-C reaches the whole group.
        (os.killpg if number == signal.SIGINT else os.kill)(run.process.pid, number)
    return run.end_within(timeout_s)


@pytest.mark.e2e
@pytest.mark.chaos
def test_sigterm_saves_and_ends_and_a_second_signal_ends_at_once(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    folder = tmp_path / "run"
    overrides = [*small(task, folder, ray_dir), "trainer.save_freq=1000", "trainer.total_training_steps=1000"]
    with drilled(FULLY_ASYNC, overrides, folder) as run:
        run.wait_for_steps(3)
        first = end(run, [signal.SIGTERM], END_S)
    assert first.returncode == 128 + signal.SIGTERM
    assert (first.summary["stopped_by"], first.summary["error"]) == ("SIGTERM", None)
    stopped_at = first.summary["steps"]
    assert (folder / f"global_step_{stopped_at}" / "committed.json").is_file()

    with drilled(FULLY_ASYNC, overrides, folder) as run:
        run.wait_for_steps(2)
        second = end(run, [signal.SIGINT, signal.SIGTERM], AT_ONCE_S)
    assert second.returncode == 128 + signal.SIGTERM
    assert second.summary["resumed"]["step"] == stopped_at
    steps = len(second.metrics)
    assert second.column("training/global_step") == list(range(1, steps + 1))
    assert steps >= stopped_at + 2

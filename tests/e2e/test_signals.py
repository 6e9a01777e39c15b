# SPDX-License-Identifier: Apache-2.0
"""A run that gets a signal ends with a checkpoint, from which the next one goes on; a second signal ends it at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import tracker_files
from drilled_run import DrilledRun, drilled
from main_runs import FULLY_ASYNC, FinishedRun, small

from recipe.laptop.task import TaskPaths

END_S, AT_ONCE_S = 60.0, 30.0
SECRET = "hunter2-marker"


def end(run: DrilledRun, numbers: list[int], timeout_s: float) -> FinishedRun:
    """The run after these signals."""
    for number in numbers:
        # A terminal's Ctrl-C reaches the whole group.
        (os.killpg if number == signal.SIGINT else os.kill)(run.process.pid, number)
    return run.end_within(timeout_s)


def check_saved(ended: FinishedRun, number: signal.Signals) -> int:
    """The run says what stopped it, and has a checkpoint of its last step, which is returned."""
    assert ended.returncode == 128 + number
    assert (ended.summary["stopped_by"], ended.summary["error"]) == (number.name, None)
    stopped_at = ended.summary["steps"]
    assert (ended.folder / f"global_step_{stopped_at}" / "committed.json").is_file()
    return stopped_at


def files_with(text: str, *folders: Path) -> list[Path]:
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return [path for path in files if text.encode() in path.read_bytes()]


@pytest.mark.e2e
@pytest.mark.chaos
def test_sigterm_ends_a_run_with_a_checkpoint_and_no_secret_is_in_any_file(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tracked = tmp_path / "run", tmp_path / "tracked"
    tracked.mkdir()
    for name, value in tracker_files.environment(tracked).items():
        monkeypatch.setenv(name, value)
    overrides = [
        *small(task, folder, ray_dir),
        f"trainer.logger=[{','.join(tracker_files.NAMES)}]",
        "trainer.save_freq=1000",
        "trainer.total_training_steps=1000",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.ANY_NAME={SECRET}",
        f"+reward.custom_reward_function.reward_kwargs.api_key={SECRET}",
    ]
    with drilled(FULLY_ASYNC, overrides, folder) as run:
        run.wait_for_steps(3)
        assert run.processes("trainer")[0].environ()["ANY_NAME"] == SECRET, "the run's processes have it"
        assert not files_with(SECRET, tmp_path, ray_dir)
        ended = end(run, [signal.SIGTERM], END_S)
    stopped_at = check_saved(ended, signal.SIGTERM)
    assert not files_with(SECRET, tmp_path, ray_dir)
    told = tracker_files.all_of_one_run(tracked, "actor/grad_norm")
    for name, of_tracker in told.items():
        assert list(of_tracker.rows) == [*range(stopped_at + 1)][-len(of_tracker.rows) :], name
        assert (of_tracker.ended["run/stopped_by"], of_tracker.ended["run/ended"]) == (
            "SIGTERM",
            ended.summary["ended"],
        )
    assert ended.summary["ended"] != "failed"
    assert (told["wandb"].status, told["mlflow"].status) == (0, "FINISHED")
    assert "(hidden)" in (folder / "config.yaml").read_text()


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_ctrl_c_saves_and_ends_and_a_second_signal_ends_at_once(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    folder = tmp_path / "run"
    overrides = [*small(task, folder, ray_dir), "trainer.save_freq=1000", "trainer.total_training_steps=1000"]
    with drilled(FULLY_ASYNC, overrides, folder) as run:
        run.wait_for_steps(3)
        first = end(run, [signal.SIGINT], END_S)
    stopped_at = check_saved(first, signal.SIGINT)

    with drilled(FULLY_ASYNC, overrides, folder) as run:
        run.wait_for_steps(2)
        second = end(run, [signal.SIGINT, signal.SIGTERM], AT_ONCE_S)
    assert second.returncode == 128 + signal.SIGTERM
    assert second.summary["resumed"]["step"] == stopped_at
    steps = len(second.metrics)
    assert second.column("training/global_step") == list(range(1, steps + 1))
    assert steps >= stopped_at + 2

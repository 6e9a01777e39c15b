# SPDX-License-Identifier: Apache-2.0
"""A run whose trainer is killed after a checkpoint goes on from it: no prompt is trained twice, none is left out."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import tracker_files
from main_runs import FULLY_ASYNC, run_main, small

from recipe.async_engine.trainer.checkpoints import problem
from recipe.laptop.task import TaskPaths

STEPS, GROUPS = 6, 4
SAVED_AT = 2
WAIT_S = 240.0


def kill_trainer(folder: Path) -> None:
    """SIGKILL the trainer's actor as soon as the first checkpoint is complete, before the next weight sync."""
    deadline = time.monotonic() + WAIT_S
    while problem(folder / f"global_step_{SAVED_AT}") is not None:
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)
    me = psutil.Process()
    for actor in [child for child in me.children(recursive=True) if "TaskRunner" in " ".join(child.cmdline())]:
        os.kill(actor.pid, signal.SIGKILL)


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_run_killed_after_a_checkpoint_trains_every_prompt_once(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    for name, value in tracker_files.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    overrides = [
        *small(task, folder, ray_dir),
        "async_training.staleness_threshold=2",
        f"trainer.save_freq={SAVED_AT}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.logger=[{','.join(tracker_files.NAMES)}]",
    ]
    killer = threading.Thread(target=kill_trainer, args=(folder,))
    killer.start()
    first = run_main(FULLY_ASYNC, overrides, folder)
    killer.join()
    assert first.returncode == 1
    checkpoint = first.rollout_state()["ledger"]
    assert checkpoint["trained"] == SAVED_AT * GROUPS
    states = [row[5] for row in checkpoint["live"]]

    second = run_main(FULLY_ASYNC, overrides, folder)
    assert second.returncode == 0, second.output[-8000:]
    total = STEPS * GROUPS
    assert second.summary["ledger"] == {"issued": total, "trained": total, "filtered": 0, "failed": 0, "live": 0}
    assert second.summary["resumed"] == {"step": SAVED_AT, "groups_kept": states.count("ready"), "changed": []}
    final = second.rollout_state()["ledger"]
    trained = [(epoch, n) for epoch, start, stop in final["trained_prompts"] for n in range(start, stop)]
    assert len(trained) == len(set(trained)) == total
    whole = dict(enumerate(second.column("actor/grad_norm"), 1))
    for told in (tracker_files.of_file(tmp_path), tracker_files.of_tensorboard(tmp_path, "actor/grad_norm")):
        assert told.column("actor/grad_norm") == pytest.approx(whole), "each step once, the last start's"
        assert told.ended["run/ended"] == second.summary["ended"]
    before, after = tracker_files.of_mlflow(tmp_path, "actor/grad_norm")
    assert (before.status, after.status) == ("KILLED", "FINISHED")
    first_run, second_run = tracker_files.of_wandb(tmp_path)
    assert (first_run.status, second_run.status) == (None, 0)
    later = {step: norm for step, norm in whole.items() if step > SAVED_AT}
    for told in (after, second_run):
        assert told.column("actor/grad_norm") == pytest.approx(later)

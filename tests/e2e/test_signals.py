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
"""A run that gets SIGTERM ends with a checkpoint, from which the next one goes on; a second signal ends it at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from main_process import with_helpers
from main_runs import FULLY_ASYNC, FinishedRun, small
from surroundings import user_environment

from recipe.async_engine.task import TaskPaths

START_S, END_S, AT_ONCE_S = 240.0, 60.0, 30.0


def wait_for(condition: Callable[[], Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Run:
    """A run in a process group of its own, as a shell starts it."""

    def __init__(self, overrides: list[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.output = folder / "output.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", FULLY_ASYNC, *overrides],
                env=with_helpers(user_environment()),
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.children: list[psutil.Process] = []

    def wait_for_step(self, step: int) -> None:
        metrics = self.folder / "metrics.jsonl"

        def reached() -> bool:
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            return bool(lines) and json.loads(lines[-1])["training/global_step"] >= step

        wait_for(reached, START_S)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def end(self, numbers: list[int], timeout_s: float) -> int:
        """The exit status after these signals; nothing that the run started may outlive it."""
        for number in numbers:
            # A terminal's Ctrl-C reaches the whole group.
            (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)
        status = self.process.wait(timeout_s)
        assert len(self.children) > 5
        wait_for(lambda: not any(child.is_running() for child in self.children), 20.0)
        return status

    def finished(self, status: int) -> FinishedRun:
        return FinishedRun(status, self.output.read_text(), self.folder)


@pytest.mark.e2e
@pytest.mark.chaos
def test_sigterm_saves_and_ends_and_a_second_signal_ends_at_once(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    folder = tmp_path / "run"
    overrides = [*small(task, folder, ray_dir), "trainer.save_freq=1000", "trainer.total_training_steps=1000"]
    first = Run(overrides, folder)
    first.wait_for_step(3)
    assert first.end([signal.SIGTERM], END_S) == 128 + signal.SIGTERM
    summary = first.finished(143).summary
    assert (summary["stopped_by"], summary["error"]) == ("SIGTERM", None)
    stopped_at = summary["steps"]
    assert (folder / f"global_step_{stopped_at}" / "committed.json").is_file()

    second = Run(overrides, folder)
    second.wait_for_step(stopped_at + 2)
    assert second.end([signal.SIGINT, signal.SIGTERM], AT_ONCE_S) == 128 + signal.SIGTERM
    run = second.finished(143)
    assert run.summary["resumed"]["step"] == stopped_at
    steps = len(run.metrics)
    assert run.column("training/global_step") == list(range(1, steps + 1))
    assert steps >= stopped_at + 2

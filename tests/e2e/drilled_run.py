# SPDX-License-Identifier: Apache-2.0
"""A run that a test starts, watches from outside and damages: its processes by name, its record, its end.

The run does not cooperate: processes are found by their titles, and its progress is read from the files that it writes
for its user. Whatever a test does, `drilled` leaves no process of the run behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from accounts import check_if_recorded
from main_runs import ENGINE, FinishedRun, as_module, trainer_log
from surroundings import user_environment, with_helpers

START_S, LEFT_S, POLL_S = 300.0, 30.0, 0.05

TITLES = {
    "trainer": "ray::TaskRunner",
    "training worker": "ray::WorkerDict",
    "rollout server": {"vllm": "ray::GatedVLLMHttpServer", "sglang": "ray::GatedSGLangHttpServer"}[ENGINE],
    "weight receiver": "ray::RolloutWeightWorker",
    "agent-loop worker": "ray::TrajectoryWorker",
    "reward worker": "ray::ScoringWorker",
    "load balancer": "ray::CountingBalancer",
    "control process": "gcs_server",
    "raylet": "raylet",
    "raylet's agent": "ray::RuntimeEnvAgent",
}
"""The beginning of a process's title, by the name that documentation and tests use."""


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)


def runs(process: psutil.Process) -> bool:
    """Return whether the process has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """Return a process's command line, or nothing if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class DrilledRun:
    """A run in a process group of its own, as a shell starts it.

    Args:
        main: a module, or "mode:trainer" as for `main_runs.run_main`.
        overrides: arguments of the main.
        folder: the run's folder; the main's output goes to a file beside it.
        before: prefix of the command, to run it elsewhere; it must turn into the main by exec.
    """

    def __init__(self, main: str, overrides: list[str], folder: Path, before: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.overrides = overrides
        self.output = folder.parent / f"output-{time.monotonic_ns()}.txt"
        module, environment = as_module(main, user_environment())
        # An earlier start of the run has left its steps.
        self._before = len(self.steps())
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", module, *overrides],
                env={**with_helpers(environment), "PYTHONFAULTHANDLER": "1"},
                cwd=folder.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.known: set[psutil.Process] = {psutil.Process(self.process.pid)}

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def steps(self) -> list[dict[str, Any]]:
        metrics = self.folder / "metrics.jsonl"
        # The last line may still be being written.
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> None:
        """Wait for ``condition``; fail the test if the run ends before."""

        def reached() -> bool:
            if condition():
                return True
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.said()[-6000:]}"
            return False

        try:
            wait_for(reached, timeout_s, what)
        except AssertionError as error:
            # The signal makes it print its stacks.
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(LEFT_S)
            raise AssertionError(f"{error}\n{self.said()[-8000:]}") from None

    def wait_for_steps(self, count: int, timeout_s: float = START_S) -> None:
        """Wait until the run has trained ``count`` steps since its start or the last wait."""
        self.wait_for(lambda: self._trained() >= self._before + count, f"{count} more steps", timeout_s)
        self._before = self._trained()
        self.look()

    def _trained(self) -> int:
        # A resumed run removes the steps that its checkpoint does not contain.
        count = len(self.steps())
        self._before = min(self._before, count)
        return count

    def look(self) -> None:
        """Record the run's processes, which cannot be found any more once a parent has died."""
        with suppress(psutil.NoSuchProcess):
            self.known |= set(psutil.Process(self.process.pid).children(recursive=True))

    def processes(self, part: str) -> list[psutil.Process]:
        """Return the processes of a part, oldest first; the title is that of forks, not of their launchers."""
        self.look()
        if part == "main":
            return [psutil.Process(self.process.pid)]
        if part == "loader worker":
            trainer = self.processes("trainer")[0]
            return [child for child in trainer.children() if title(child).startswith(TITLES["trainer"])]
        if part == "fork server":
            servers = [process for process in self.known if "recipe.laptop.prefork.server" in title(process)]
            return [process for process in servers if process.ppid() == self.process.pid]
        name = TITLES[part]
        found = [
            process
            for process in self.known
            if runs(process) and (title(process).startswith(name) or Path(title(process).split(" ")[0]).name == name)
        ]
        ids = {process.pid for process in found}
        own = [process for process in found if process.ppid() not in ids]
        return sorted(own, key=lambda process: process.create_time())

    def signal(self, part: str, number: int) -> psutil.Process:
        """Send a signal to the first process of a part."""
        found = self.processes(part)
        assert found, f"no {part} among\n" + "\n".join(sorted(title(process)[:100] for process in self.known))
        os.kill(found[0].pid, number)
        return found[0]

    def end_within(self, timeout_s: float, left_s: float = LEFT_S) -> FinishedRun:
        """Return the finished run, its account checked; no process of it may outlive the main by ``left_s``."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run has not ended within {timeout_s:g} s:\n{self.said()[-6000:]}") from None
        wait_for(lambda: not self.left(), left_s, "no process left")
        sys.stdout.write(f"{self.said()}\n{trainer_log(self.overrides)}\n")  # pytest shows it if a test fails
        run = FinishedRun(status, self.said(), self.folder)
        check_if_recorded(run)
        return run

    def left(self) -> list[psutil.Process]:
        """Return remaining processes: known ones, and those with the run's or Ray's folder in their command line."""
        places = [item.partition("=")[2] for item in self.overrides if "_temp_dir=" in item or "local_dir=" in item]
        strangers = {process for process in psutil.process_iter() if any(place in title(process) for place in places)}
        mine = {psutil.Process(), *psutil.Process().parents()}
        return [process for process in self.known | strangers - mine if runs(process)]

    def kill(self) -> None:
        self.look()
        for process in self.left():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(LEFT_S)


@contextmanager
def drilled(main: str, overrides: list[str], folder: Path, before: Sequence[str] = ()) -> Iterator[DrilledRun]:
    """Start a run that is ended, with all its processes, however the test leaves the context."""
    run = DrilledRun(main, overrides, folder, before)
    try:
        yield run
    finally:
        run.kill()


def committed_steps(folder: Path) -> list[int]:
    """Return the steps of a run's complete checkpoints, without those of an abandoned history."""
    names = [marker.parent.name.removeprefix("global_step_") for marker in folder.glob("global_step_*/committed.json")]
    return [int(name) for name in names if name.isdecimal()]


def check_books(run: FinishedRun, groups: int) -> None:
    """Check that every issued group is accounted for, and that no prompt was trained twice."""
    ledger = run.summary["ledger"]
    assert ledger["issued"] == sum(ledger[key] for key in ("trained", "filtered", "failed", "live"))
    assert ledger["trained"] == groups
    saved = run.rollout_state()["ledger"]
    trained = [(epoch, n) for epoch, start, stop in saved["trained_prompts"] for n in range(start, stop)]
    assert len(trained) == len(set(trained)) == groups


STOP, CONTINUE, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL

# SPDX-License-Identifier: Apache-2.0
"""A run that a test starts, watches from outside and does harm to: its processes by name, its record, its end.

Nothing in the run helps: processes are found by their titles, and how far the run has come is read from the files that
it writes for its user. Whatever a test does, `drilled` leaves no process of the run behind.
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
from main_runs import FinishedRun, as_module, trainer_log
from surroundings import user_environment, with_helpers

START_S, LEFT_S, POLL_S = 300.0, 30.0, 0.05

TITLES = {
    "trainer": "ray::TaskRunner",
    "training worker": "ray::WorkerDict",
    "rollout server": "ray::GatedVLLMHttpServer",
    "weight receiver": "ray::RolloutWeightWorker",
    "agent-loop worker": "ray::TrajectoryWorker",
    "reward worker": "ray::ScoringWorker",
    "load balancer": "ray::CountingBalancer",
    "control process": "gcs_server",
    "raylet": "raylet",
    "raylet's agent": "ray::RuntimeEnvAgent",
}
"""How the title of a process begins, by the name that documentation and tests have for it."""


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one whose parent has not asked for its status has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """Its command line, or nothing if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class DrilledRun:
    """A run in a process group of its own, as a shell starts it.

    Args:
        main: a module, or "mode:trainer" as for `main_runs.run_main`.
        overrides: what the main is started with.
        folder: of the run; what the main says goes to a file beside it.
        before: of the command, to run it somewhere else; it must become the main.
    """

    def __init__(self, main: str, overrides: list[str], folder: Path, before: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.overrides = overrides
        self.output = folder.parent / f"output-{time.monotonic_ns()}.txt"
        module, environment = as_module(main, user_environment())
        # A life before this one has left its steps.
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
        # What follows the last line's end is being written.
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> None:
        """Until ``condition``; a run that ends before fails the test."""

        def reached() -> bool:
            if condition():
                return True
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.said()[-6000:]}"
            return False

        try:
            wait_for(reached, timeout_s, what)
        except AssertionError as error:
            # It prints where it is.
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(LEFT_S)
            raise AssertionError(f"{error}\n{self.said()[-8000:]}") from None

    def wait_for_steps(self, count: int, timeout_s: float = START_S) -> None:
        """Until this life of the run has trained ``count`` steps more than when it was started or last waited for."""
        self.wait_for(lambda: self._trained() >= self._before + count, f"{count} more steps", timeout_s)
        self._before = self._trained()
        self.look()

    def _trained(self) -> int:
        # A resumed run takes back the steps that its checkpoint does not have.
        count = len(self.steps())
        self._before = min(self._before, count)
        return count

    def look(self) -> None:
        """Take note of the run's processes; when a parent has died they can't be found any more."""
        with suppress(psutil.NoSuchProcess):
            self.known |= set(psutil.Process(self.process.pid).children(recursive=True))

    def processes(self, part: str) -> list[psutil.Process]:
        """Those that are ``part``, oldest first; forks have the title, the launchers that asked for them do not."""
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
        """Send it to the first process that is ``part``."""
        found = self.processes(part)
        assert found, f"no {part} among\n" + "\n".join(sorted(title(process)[:100] for process in self.known))
        os.kill(found[0].pid, number)
        return found[0]

    def end_within(self, timeout_s: float, left_s: float = LEFT_S) -> FinishedRun:
        """The run when its main has ended, its account checked; nothing of it outlives that by more than ``left_s``."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run has not ended within {timeout_s:g} s:\n{self.said()[-6000:]}") from None
        wait_for(lambda: not self.left(), left_s, "no process left")
        sys.stdout.write(f"{self.said()}\n{trainer_log(self.overrides)}\n")  # pytest shows it where a test fails
        run = FinishedRun(status, self.said(), self.folder)
        check_if_recorded(run)
        return run

    def left(self) -> list[psutil.Process]:
        """Of the processes seen, and of those that have the run's folder or Ray's in their command line."""
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
    """A run that is over, with all its processes, when the test leaves it in whatever way."""
    run = DrilledRun(main, overrides, folder, before)
    try:
        yield run
    finally:
        run.kill()


def committed_steps(folder: Path) -> list[int]:
    """The steps of a run's complete checkpoints; those of a history that it has left have other names."""
    names = [marker.parent.name.removeprefix("global_step_") for marker in folder.glob("global_step_*/committed.json")]
    return [int(name) for name in names if name.isdecimal()]


def check_books(run: FinishedRun, groups: int) -> None:
    """Every group that was issued is accounted for, and no prompt was trained twice."""
    ledger = run.summary["ledger"]
    assert ledger["issued"] == sum(ledger[key] for key in ("trained", "filtered", "failed", "live"))
    assert ledger["trained"] == groups
    saved = run.rollout_state()["ledger"]
    trained = [(epoch, n) for epoch, start, stop in saved["trained_prompts"] for n in range(start, stop)]
    assert len(trained) == len(set(trained)) == groups


STOP, CONTINUE, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL

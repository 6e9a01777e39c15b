# SPDX-License-Identifier: Apache-2.0
"""Ends a run and all of its processes, at the run's own end or after a signal.

Contract: the first signal asks the run to end after the present step, with a checkpoint if the run saves any. The run
ends at once if a second signal comes, if the deadline passes, or if there is no trainer yet at the first signal. No
process that a run has started on the main process's machine outlives the run, even if it is suspended or hangs.
Processes are ended first, and the summary is written last. If one step of the shutdown fails, the other steps are still
carried out, and the first error is reported. `run/supervisor.py` ends a main process that is stuck. Shown by
tests/integration/test_shutdown.py, tests/e2e/test_signals.py and test_stalls.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import psutil

from recipe.async_engine.core.deadlines import PROCESS_END_S
from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.outside import FORK_SERVER

SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_S = 0.05
NOTABLE_RISE = 1.02
NEEDED = {
    "/raylet/raylet ": "Ray's raylet",
    "/gcs/gcs_server ": "Ray's control process",
    FORK_SERVER: "the process that workers are forked from",
}
"""The processes without which a run cannot continue. A key is a part of the process's command line, and its value is
the name of the process in messages.
"""
STOPPED = "is stopped"


class EndAtOnce(KeyboardInterrupt):
    """The run has to end at once, after a second signal or a deadline. ``status`` is the process's exit status."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


class EndingOnSignal:
    """A context manager for the main thread, which ends a run on signals as the module's docstring describes.

    ``status`` is the exit status of the process, or None if no signal came.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self._at_once: EndAtOnce | None = None
        self._stop: Callable[[str], Any] | None = None
        self._deadline_s = 0.0
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EndingOnSignal:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def ask(self, stop: Callable[[str], Any], deadline_s: float) -> None:
        """From now on, let the first signal ask the run to end.

        Args:
            stop: function that asks the run to end; it gets the signal's name and must not wait.
            deadline_s: seconds that the run may take from the first signal to its end.
        """
        self._stop, self._deadline_s = stop, deadline_s
        for number in SIGNALS:  # Ray replaced these handlers when it started
            signal.signal(number, self._on_signal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # Restore the exception of the signal handler, because some calls of Ray replace it by a plain
        # KeyboardInterrupt.
        if self._at_once is not None and kind is KeyboardInterrupt:
            raise self._at_once

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.status is not None or self._stop is None:
            self._at_once = EndAtOnce(number)
            raise self._at_once
        self.status = 128 + number
        name = signal.Signals(number).name
        sys.stderr.write(
            f"\n{name}: the run ends after the step under way, within {self._deadline_s:g} s "
            "(async_training.timeouts.stop); a second signal ends it at once\n"
        )
        self._timer = threading.Timer(self._deadline_s, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()
        self._stop(name)


def end_in_order(steps: Mapping[str, Callable[[], Any]]) -> BaseException | None:
    """Carry out all steps in order, even if some fail; return the first error, or None.

    The keys of ``steps`` name the steps in messages.
    """
    first: BaseException | None = None
    for what, step in steps.items():
        try:
            step()
        except BaseException as error:  # a signal may also interrupt a step
            sys.stderr.write(f"\n{what} failed: {type(error).__name__}: {error}\n")
            first = first or error
    return first


class StartedProcesses:
    """Records, measures and ends the processes that this process starts from now on, and all descendants of these.

    Args:
        own: whether the processes belong to the run; if not, they are only measured.

    Attributes:
        peak_gib: largest measured memory of this process and its descendants together, in GiB.
    """

    def __init__(self, own: bool = True) -> None:
        self.peak_gib = 0.0
        self._highest_bound = 0.0
        self._own = own
        self._others = set(psutil.Process().children(recursive=True))
        self._found: set[psutil.Process] = set()
        self._needed: dict[psutil.Process, str] = {}

    def look(self) -> None:
        """Record the descendants that exist now, because a descendant cannot be found after its parent has ended."""
        if self._own:
            self._found = {process for process in self._found if _runs(process)}
            self._found.update(set(psutil.Process().children(recursive=True)) - self._others)

    def measure(self) -> None:
        """Measure the memory of this process and its descendants; short peaks between two calls are missed.

        Each process counts with its proportional share (Linux's PSS): all memory of its own, and a part of the memory
        that it shares with other processes, such as the process from which it was forked. Reading the share halts the
        process for milliseconds. So the shares are read only if the sum of resident memory, which is an upper bound,
        has risen.
        """
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        bound = sum(_bytes(process, exactly=False) for process in family)
        if bound > NOTABLE_RISE * self._highest_bound:
            self._highest_bound = bound
            self.peak_gib = max(self.peak_gib, sum(_bytes(process, exactly=True) for process in family) / 2**30)

    def look_for_needed(self) -> None:
        for child in psutil.Process().children() if self._own else ():
            with suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                for name in (name for mark, name in NEEDED.items() if mark in command):
                    self._needed[child] = name

    def lost(self) -> CannotGoOn | None:
        """Return an error that names the needed processes that have ended or are suspended; None if all of them run."""
        states = {f"{name} (process {process.pid})": _state(process) for process, name in self._needed.items()}
        said = [f"{name} {state}" for name, state in states.items() if state]
        return CannotGoOn(", ".join(said)) if said else None

    def end_stopped(self) -> None:
        """Kill the processes of `NEEDED` that are suspended, because shutting down Ray would wait for their answers."""
        for process in self._needed:
            if _state(process) == STOPPED:
                process.kill()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return what caused ``error``: the loss of a needed process if there was one, else ``error`` itself."""
        lost = self.lost() if isinstance(error, Exception) else None
        return lost or error

    def end(self, grace_s: float = PROCESS_END_S) -> list[int]:
        """Kill those recorded processes that do not end by themselves within ``grace_s`` seconds; return their ids."""
        deadline = time.monotonic() + grace_s
        while (left := [process for process in self._found if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return [process.pid for process in left]


def _bytes(process: psutil.Process, exactly: bool) -> int:
    """Return a process's memory in bytes; 0 if the process has ended.

    This is its proportional share (PSS) with ``exactly``, else its resident set size.
    """
    try:
        memory = process.memory_full_info() if exactly else process.memory_info()
    except psutil.Error:
        return 0
    return getattr(memory, "pss", memory.uss) if exactly else memory.rss


def _state(process: psutil.Process) -> str | None:
    """Return why a process cannot work: it has ended or is suspended. Return None if it can work."""
    if not _runs(process):
        return "has ended"
    return STOPPED if process.status() == psutil.STATUS_STOPPED else None


def _runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended. A zombie counts as ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

# SPDX-License-Identifier: Apache-2.0
"""How a run ends: by a signal, in order, and at last by force.

Contract: the first signal asks the run to end after its present step, with a checkpoint if it saves any; the second
one, or the deadline, ends it at once, as the first one does before there is a trainer. Of the processes that a run has
started on its own machine none outlives it, also if it was stopped or hangs. Ending comes first and reporting last;
a step that fails keeps none of the others from being made, and hides no earlier error; where the main itself is stuck,
it is ended all the same. Shown by tests/integration/test_shutdown.py, tests/e2e/test_signals.py and test_stalls.py.
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

from recipe.async_engine.actors.watch import Silence
from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.outside import FORK_SERVER

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S, POLL_S = 5.0, 0.05
LOOK_S, FORCE_S = 1.0, 20.0
NEEDED = {
    "/raylet/raylet ": "Ray's raylet",
    "/gcs/gcs_server ": "Ray's control process",
    FORK_SERVER: "the process that workers are forked from",
}
"""By what their command lines have in them."""
STOPPED = "is stopped"


class EndAtOnce(KeyboardInterrupt):
    """A second signal came, or the run did not end in time. ``status``: what the process is to exit with."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


class EndingOnSignal:
    """A context manager of the main thread; see the module's contract.

    Attributes:
        status: what the process is to exit with, None without a signal.
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
        """From now on the first signal asks the run to end, by ``stop``, which gets its name and must not wait.

        ``deadline_s``: from the first signal to the end of the run.
        """
        self._stop, self._deadline_s = stop, deadline_s
        for number in SIGNALS:  # Ray has taken them when it started
            signal.signal(number, self._on_signal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # What is raised within one of Ray's calls comes out of it as another KeyboardInterrupt.
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
    """Make every step, in order, whatever the others do; returns the first error. Keys say what a step does."""
    first: BaseException | None = None
    for what, step in steps.items():
        try:
            step()
        except BaseException as error:  # a signal that ends a step, too
            sys.stderr.write(f"\n{what} failed: {type(error).__name__}: {error}\n")
            first = first or error
    return first


class LastResort:
    """Ends this process where its main thread does not come to the end of what it does; a thread of its own.

    ``end``: what is to be done before; gets why. It may hang or fail.
    """

    def __init__(self, end: Callable[[str], Any]) -> None:
        self._end = end
        self._allowed: tuple[str, Silence] | None = None
        threading.Thread(target=self._watch, name="last-resort", daemon=True).start()

    def allow(self, what: str, limit_s: float) -> None:
        """What the main thread does from now on, and how long until the next call of this."""
        self._allowed = what, Silence(limit_s, time.monotonic())

    def stop(self) -> None:
        """Whatever comes may take its time."""
        self._allowed = None

    def _watch(self) -> None:
        while (allowed := self._allowed) is None or not allowed[1].look(time.monotonic()):
            time.sleep(LOOK_S)
        why = f"{allowed[0]} took longer than {allowed[1].limit_s:g} s; the run is ended by force"
        ending = threading.Thread(target=self._end, args=(why,), daemon=True)
        ending.start()
        ending.join(FORCE_S)
        os._exit(1)


class StartedProcesses:
    """The processes that this one starts from now on, with all that they start; none of them if ``own`` is False."""

    def __init__(self, own: bool = True) -> None:
        self._own = own
        self._others = set(psutil.Process().children(recursive=True))
        self._found: set[psutil.Process] = set()
        self._needed: dict[psutil.Process, str] = {}

    def look(self) -> None:
        """Take note of what is there now; its parents may be gone later."""
        if self._own:
            self._found = {process for process in self._found if _runs(process)}
            self._found.update(set(psutil.Process().children(recursive=True)) - self._others)

    def look_for_needed(self) -> None:
        """Take note of those that nothing else in a run can do without."""
        for child in psutil.Process().children() if self._own else ():
            with suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                for name in (name for mark, name in NEEDED.items() if mark in command):
                    self._needed[child] = name

    def lost(self) -> CannotGoOn | None:
        """What is to be said of those that are needed and do not run any more."""
        states = {f"{name} (process {process.pid})": _state(process) for process, name in self._needed.items()}
        said = [f"{name} {state}" for name, state in states.items() if state]
        return CannotGoOn(", ".join(said)) if said else None

    def end_stopped(self) -> None:
        """Kill those that are needed and stopped: whoever leaves Ray would wait for their answer."""
        for process in self._needed:
            if _state(process) == STOPPED:
                process.kill()

    def blamed(self, error: BaseException) -> BaseException:
        """What an error comes from: a needed process if any is lost, else itself."""
        lost = self.lost() if isinstance(error, Exception) else None
        return lost or error

    def end(self, grace_s: float = GRACE_S) -> list[int]:
        """Kill what was there at a look and does not end by itself. Returns the ids of what was killed."""
        deadline = time.monotonic() + grace_s
        while (left := [process for process in self._found if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return [process.pid for process in left]


def _state(process: psutil.Process) -> str | None:
    """What keeps it from working, if anything."""
    if not _runs(process):
        return "has ended"
    return STOPPED if process.status() == psutil.STATUS_STOPPED else None


def _runs(process: psutil.Process) -> bool:
    """Not one that has ended and whose parent has not asked for its status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

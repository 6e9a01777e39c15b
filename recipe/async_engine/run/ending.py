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
"""What SIGTERM and Ctrl-C do to a run, and what is left of it at its end.

Contract: the first signal asks the run to end after its present step, with a checkpoint if it saves any; the second
one, or the deadline, ends it at once. Of the processes that a run has started on its own machine none outlives it, also
if it was stopped or hangs. Shown by tests/integration/test_ending.py, tests/e2e/test_signals.py and test_stalls.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S, POLL_S = 5.0, 0.05


class EndAtOnce(KeyboardInterrupt):
    """A second signal came, or the run did not end in time. ``status``: what the process is to exit with."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


class EndingOnSignal:
    """A context manager of the main thread; see the module's contract.

    Args:
        stop: asks the run to end; gets the signal's name, and must not wait.
        deadline_s: from the first signal to the end of the run.

    Attributes:
        status: what the process is to exit with, None without a signal.
    """

    def __init__(self, stop: Callable[[str], Any], deadline_s: float) -> None:
        self.status: int | None = None
        self._at_once: EndAtOnce | None = None
        self._stop = stop
        self._deadline_s = deadline_s
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EndingOnSignal:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

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
        if self.status is not None:
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


class StartedProcesses:
    """The processes that this one starts from now on, with all that they start."""

    def __init__(self) -> None:
        self._others = set(psutil.Process().children(recursive=True))
        self._found: list[psutil.Process] = []

    def look(self) -> None:
        """Take note of what is there now; its parents may be gone later."""
        self._found = [child for child in psutil.Process().children(recursive=True) if child not in self._others]

    def end(self, grace_s: float = GRACE_S) -> list[int]:
        """Kill what was there at the last look and does not end by itself. Returns the ids of what was killed."""
        deadline = time.monotonic() + grace_s
        while (left := [process for process in self._found if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return [process.pid for process in left]


def _runs(process: psutil.Process) -> bool:
    """Not one that has ended and whose parent has not asked for its status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

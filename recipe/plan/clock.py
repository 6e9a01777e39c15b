# SPDX-License-Identifier: Apache-2.0
"""A virtual clock: what happens next, in order of time, and parts that wait for it.

Contract: time never goes backwards; what is due at the same moment happens in the order in which it was asked for, so
the same calls give the same run. A process is a generator that yields seconds to wait for, or a condition; conditions
are looked at when :meth:`Clock.changed` is called. Shown by tests/plan/test_simulation.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from itertools import count

Process = Generator[float | Callable[[], bool], None, None]


class Clock:
    """See the module's contract; ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting: list[tuple[Callable[[], bool], Process]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do this so many seconds from now."""
        heapq.heappush(self._due, (self.now + max(0.0, seconds), next(self._numbers), action))

    def start(self, process: Process) -> None:
        """Let a process run to its next wait."""
        for wanted in process:
            if not callable(wanted):
                self.after(wanted, lambda: self.start(process))
                return
            if not wanted():
                self._waiting.append((wanted, process))
                return

    def changed(self) -> None:
        """Let those go on whose condition holds now."""
        for waiting in [waiting for waiting in self._waiting if waiting[0]()]:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self.after(0.0, lambda process=waiting[1]: self.start(process))  # type: ignore[misc]

    def run(self, over: Callable[[], bool]) -> None:
        """Let everything happen until ``over``, or until nothing is due."""
        while self._due and not over():
            self.now, _, action = heapq.heappop(self._due)
            action()

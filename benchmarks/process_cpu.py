# SPDX-License-Identifier: Apache-2.0
"""Measures CPU seconds of a run's processes between two moments, by the class of a Ray actor or by program."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

EVERY_S = 2.0
IDLE = "IDLE"


class ProcessTimes:
    """Samples all processes below this one, from `start` to `stop`."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._times: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self, began: float, ended: float) -> dict[str, float]:
        """Return the CPU seconds between two times of day, by process name."""
        found: defaultdict[str, float] = defaultdict(float)
        for pid, times in self._times.items():
            at, used = zip(*times, strict=True)
            found[self._names[pid]] += float(np.interp(ended, at, used) - np.interp(began, at, used))
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _follow(self) -> None:
        while not self._ended.wait(EVERY_S):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    used, name = process.cpu_times(), name_of(process.cmdline())
                    self._times[process.pid].append((time.time(), used.user + used.system))
                    if name != IDLE or process.pid not in self._names:
                        self._names[process.pid] = name


def name_of(command: list[str]) -> str:
    """Return an actor's class, from the title that Ray gives its process; otherwise the module or program."""
    first = command[0] if command else ""
    if first.startswith("ray::"):
        return first.removeprefix("ray::").split(" ")[0].split(".")[0]
    if "-m" in command:
        return command[command.index("-m") + 1]
    return Path(first.split(" ")[0]).name

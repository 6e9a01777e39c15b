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
"""Ends a run that stands still, and says who waits for whom.

Contract: when nothing has begun or ended for ``async_training.timeouts.stall`` seconds, the watch asks every part what
it waits for, writes the answers to ``stall_report.txt`` in the run's folder, and ends the run with them: the trainer's
wait for a batch fails, or, where it waits for something else, its process is ended. What does not answer is named.

Shown by tests/integration/test_stall.py and tests/e2e/test_stalls.py.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.timeline import Timeline

logger = logging.getLogger(__name__)

STALL_FILE = "stall_report.txt"
ANSWER_S = 3.0
GRACE_S = 5.0
STATUS = 70


class Stalled(RecipeError):
    """Nothing has begun or ended for too long; the message says who waits for whom."""


class StallWatch:
    """A thread beside the trainer's; see the module's contract.

    Args:
        timeline: knows when something last happened.
        limit_s: how long nothing may happen.
        describe: the report, from the seconds of silence.
        fail: makes the trainer's wait for a batch fail with an error.
        folder: of the run.
        leave: ends this process.
    """

    def __init__(
        self,
        timeline: Timeline,
        limit_s: float,
        describe: Callable[[float], str],
        fail: Callable[[BaseException], None],
        folder: str | os.PathLike[str],
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self._timeline, self._limit_s = timeline, limit_s
        self._describe, self._fail, self._leave = describe, fail, leave
        self._file = Path(folder) / STALL_FILE
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """The run has ended, however it did."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(5.0, self._limit_s / 10)):
            silent_s = self._timeline.silent_s
            if silent_s > self._limit_s:
                self._end(silent_s)
                return

    def _end(self, silent_s: float) -> None:
        try:
            report = self._describe(silent_s)
        except Exception as error:  # the run ends without a report rather than not at all
            report = (
                f"nothing has happened for {silent_s:.0f} s; the report failed with {type(error).__name__}: {error}"
            )
        logger.error("%s", report)
        self._file.write_text(report + "\n")
        self._fail(Stalled(report))
        if not self._over.wait(GRACE_S):
            self._leave(STATUS)


def answers(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What parts say, by name: object references of their answers; an exception's text, or that none came."""
    said: dict[str, Any] = {}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else None
    for name, reference in asked.items():
        try:
            said[name] = ray.get(reference, timeout=0)
        except GetTimeoutError:
            said[name] = f"DOES NOT ANSWER within {ANSWER_S:g} s"
        except RayError as error:
            said[name] = f"IS DEAD or failed: {type(error).__name__}"
    return said

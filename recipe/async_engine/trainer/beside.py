# SPDX-License-Identifier: Apache-2.0
"""Runs work on a thread beside the trainer's, one piece at a time.

Contract: the work is over when it has returned or failed, or at its deadline, which counts from its beginning. Whoever
waits for it gets its result or its error. ``alarm`` is called with an error at once, even if nobody waits. Shown by
tests/integration/test_beside.py and test_saving.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Beside(Generic[Result]):
    """Runs work as the module's contract says. Only one thread may call it.

    Args:
        name: the name of the thread.
        timeout_s: how long the work may take in total.
        late: returns the error for work that is late, given its number.
        alarm: called on the work's thread with the error of work that failed.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        late: Callable[[int], Exception],
        alarm: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._name, self._timeout_s, self._late, self._alarm = name, timeout_s, late, alarm
        self._number = -1
        self._deadline = 0.0
        self._outcome: Future[Result] | None = None

    def begin(self, number: int, work: Callable[[], Result]) -> None:
        """Begin ``work``, which is identified by ``number``. Earlier work must have been waited for."""
        assert self._outcome is None, f"{self._name} {self._number} is under way"
        outcome: Future[Result] = Future()
        self._number, self._outcome, self._deadline = number, outcome, time.monotonic() + self._timeout_s

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                outcome.set_exception(error)
                self._alarm(error)
            else:
                outcome.set_result(result)

        threading.Thread(target=run, name=self._name, daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether there is work that is done or late, so that `wait` returns at once."""
        return self._outcome is not None and (self._outcome.done() or time.monotonic() >= self._deadline)

    def wait(self) -> Result | None:
        """Wait for the present work and return its result, or None if there is no work.

        Raises:
            Exception: the error of the work, or what ``late`` returns.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return None
        try:
            return outcome.result(max(0.0, self._deadline - time.monotonic()))
        except TimeoutError as error:
            if outcome.done():
                raise
            raise self._late(self._number) from error

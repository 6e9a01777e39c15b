# SPDX-License-Identifier: Apache-2.0
"""Runs a function on another thread while training continues, one function at a time.

Contract: the work is over when the function returns or raises, or when its deadline has passed. `wait` returns the
result or raises the error. If the function raises an error, ``alarm`` is called with the error at once, even if `wait`
is called later or never. Shown by tests/integration/test_beside.py and test_saving.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Beside(Generic[Result]):
    """Runs functions on another thread. Only one thread may call the methods.

    Args:
        timeout_s: seconds that each function may take.
        late: makes the error that `wait` raises if the work has exceeded its deadline. It gets the number that was
            passed to `begin` with the work.
        alarm: called on the other thread with the error, if the work raises one.
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
        """Start ``work`` on the other thread. If there was earlier work, `wait` must have been called since.

        ``number`` identifies the work in messages.
        """
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
        """Whether there is work that has ended or exceeded its deadline. In this case, `wait` does not block."""
        return self._outcome is not None and (self._outcome.done() or time.monotonic() >= self._deadline)

    def wait(self) -> Result | None:
        """Wait for the current work and return its result, or None if no work was begun.

        Raises:
            Exception: the work's own error, or, after the deadline, the error that ``late`` returns.
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

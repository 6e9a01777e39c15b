# SPDX-License-Identifier: Apache-2.0
"""The version that is on its way from the trainer to the replicas, while the trainer goes on.

Contract: there is one at a time. Its work is done on a thread of its own, and is over when it returned or failed, or at
its deadline. Whoever waits for it gets its error; until someone does, ``alarm`` has been given it at once. Shown by
tests/integration/test_publication.py and tests/e2e/test_faults.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from recipe.async_engine.weights.publisher import PublishFailed

Metrics = dict[str, float]


class Publication:
    """See the module's contract; one thread calls it.

    Args:
        timeout_s: how long the work may take in all.
        setting: what the deadline follows from, for its message.
        alarm: called with the error of work that failed, on the work's thread.
    """

    def __init__(self, timeout_s: float, setting: str, alarm: Callable[[BaseException], None]) -> None:
        self._timeout_s, self._setting, self._alarm = timeout_s, setting, alarm
        self._version = -1
        self._outcome: Future[Metrics] | None = None

    def begin(self, version: int, work: Callable[[], Metrics]) -> None:
        """Have ``version`` published by ``work``; the one before must have been waited for."""
        assert self._outcome is None, f"version {self._version} is on its way"
        outcome: Future[Metrics] = Future()
        self._version, self._outcome = version, outcome

        def run() -> None:
            try:
                metrics = work()
            except BaseException as error:
                outcome.set_exception(error)
                self._alarm(error)
            else:
                outcome.set_result(metrics)

        threading.Thread(target=run, name="publication", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether there is one that can be waited for without waiting."""
        return self._outcome is not None and self._outcome.done()

    def wait(self) -> Metrics:
        """Wait for the version on its way; returns its metrics, none where there is no such version.

        Raises:
            PublishFailed: it was not announced in time.
            Exception: whatever its work raised.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return {}
        try:
            return outcome.result(self._timeout_s)
        except TimeoutError as error:
            if outcome.done():
                raise
            raise PublishFailed(
                f"version {self._version} was not announced within {self._timeout_s:g} s ({self._setting})"
            ) from error

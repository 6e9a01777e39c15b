# SPDX-License-Identifier: Apache-2.0
"""Starts a new replica for each one that a run has lost, beside the run.

Contract: nobody waits for it. On a thread of its own the lost one is cleared away, its processes and its resources, and
another one started; `take` hands it out when it is up. Each attempt, whether it succeeds or not, counts against the
budget; past it, what is lost stays lost, which the log says. An attempt longer than the deadline is given up, and what
it starts after all is cleared away.

Shown by tests/integration/test_replacement.py and, with real replicas, tests/e2e/test_replacement.py.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass
class _Attempt:
    what: str
    start: Callable[[], Any]
    deadline: float
    result: Future[Any]


class Replacements:
    """See the module's contract.

    Args:
        budget, timeout_s: attempts in all, and the longest time for one.
        clear: removes what is left of a lost replica.

    Attributes:
        begun: attempts so far.
    """

    def __init__(self, budget: int, timeout_s: float, clear: Callable[[Any], None]) -> None:
        self.begun = 0
        self._budget = budget
        self._timeout_s = timeout_s
        self._clear = clear
        self._attempts: list[_Attempt] = []

    @property
    def under_way(self) -> int:
        """Replicas that are being started, or are up and wait for the next weight sync."""
        return len(self._attempts)

    def begin(self, what: str, lost: Any, start: Callable[[], Any]) -> None:
        """Have ``start`` make another replica in the place of ``lost``; ``what`` names it in the log."""
        if self.begun >= self._budget:
            logger.error(
                "%s is not started: %d have been (async_training.max_replica_restarts=%d)",
                what,
                self.begun,
                self._budget,
            )
            threading.Thread(target=self._clear_away, args=[lost], name="clear a lost replica", daemon=True).start()
            return
        self.begun += 1
        attempt = _Attempt(what, start, time.monotonic() + self._timeout_s, Future())
        self._attempts.append(attempt)
        threading.Thread(target=self._work, args=[attempt, lost], name=f"start {what}", daemon=True).start()

    def take(self) -> list[Any]:
        """Replicas that came up since the last call; they hold no weights yet."""
        attempts, self._attempts, ready = self._attempts, [], []
        for attempt in attempts:
            if not attempt.result.done():
                if time.monotonic() > attempt.deadline and attempt.result.cancel():
                    logger.error("%s could not be started: not up after %g s", attempt.what, self._timeout_s)
                else:
                    self._attempts.append(attempt)
            elif (error := attempt.result.exception()) is not None:
                logger.error("%s could not be started: %s", attempt.what, error)
                self.begin(attempt.what, None, attempt.start)
            else:
                logger.warning("%s is up and takes part from the next weight sync on", attempt.what)
                ready.append(attempt.result.result())
        return ready

    def _work(self, attempt: _Attempt, lost: Any) -> None:
        # The future is cancelled when `take` has given the attempt up.
        try:
            self._clear_away(lost)
            started = attempt.start()
        except BaseException as error:  # whatever it is, `take` reports it
            if attempt.result.set_running_or_notify_cancel():
                attempt.result.set_exception(error)
            return
        if attempt.result.set_running_or_notify_cancel():
            attempt.result.set_result(started)
        else:
            self._clear(started)

    def _clear_away(self, lost: Any) -> None:
        """None: nothing is left of it, since another attempt was made in its place."""
        if lost is not None:
            self._clear(lost)

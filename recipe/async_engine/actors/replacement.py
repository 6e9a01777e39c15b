# SPDX-License-Identifier: Apache-2.0
"""Starts a new replica for each one that a run has lost, beside the run.

Contract: nobody waits for it. On a thread of its own the lost one is cleared away, its processes and its resources, and
another one started; `take` hands it out when it is up. Each attempt, whether it succeeds or not, counts against the
budget, unless it found no free accelerators: that one is made again, at every `take`, until there are some. Past the
budget, what is lost stays lost, which the log says. An attempt longer than the deadline is given up, and what it starts
after all is cleared away.

Shown by tests/integration/test_replacement.py and, with real replicas, tests/e2e/test_replacement.py and test_nodes.py.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from recipe.async_engine.core.errors import NothingFree

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Place:
    """One that is to be filled; ``lost``: what is left of the one before, None when that is cleared away."""

    what: str
    start: Callable[[], Any]
    lost: Any = None
    waited: bool = False


@dataclass
class _Attempt:
    place: _Place
    deadline: float
    result: Future[Any] = field(default_factory=Future)


class Replacements:
    """See the module's contract.

    Args:
        budget, timeout_s: attempts in all, and the longest time for one.
        clear: removes what is left of a lost replica.

    Attributes:
        begun: attempts so far, without those that found no free accelerators.
    """

    def __init__(self, budget: int, timeout_s: float, clear: Callable[[Any], None]) -> None:
        self.begun = 0
        self._budget = budget
        self._timeout_s = timeout_s
        self._clear = clear
        self._attempts: list[_Attempt] = []
        # Wait for an attempt under way to find nothing free, which makes room in the budget.
        self._waiting: list[_Place] = []

    @property
    def under_way(self) -> int:
        """Replicas that are being started, or are up and wait for the next weight sync."""
        return len(self._attempts)

    def begin(self, what: str, lost: Any, start: Callable[[], Any]) -> None:
        """Have ``start`` make another replica in the place of ``lost``; ``what`` names it in the log.

        A ``start`` that raises NothingFree is asked again later.
        """
        self._fill(_Place(what, start, lost))

    def take(self) -> list[Any]:
        """Replicas that came up since the last call; they hold no weights yet."""
        attempts, self._attempts, ready = self._attempts, [], []
        again, self._waiting = self._waiting, []
        for attempt in attempts:
            what = attempt.place.what
            if not attempt.result.done():
                if time.monotonic() > attempt.deadline and attempt.result.cancel():
                    logger.error("%s could not be started: not up after %g s", what, self._timeout_s)
                else:
                    self._attempts.append(attempt)
            elif (error := attempt.result.exception()) is None:
                ready.append(attempt.result.result())
            else:
                waits = isinstance(error, NothingFree)
                again.append(_Place(what, attempt.place.start, waited=waits))
                if not waits:
                    logger.error("%s could not be started: %s", what, error)
                    continue
                self.begun -= 1
                if not attempt.place.waited:
                    logger.error("%s waits, and is tried again at each weight sync: %s", what, error)
        for place in again:
            self._fill(place)
        return ready

    def _fill(self, place: _Place) -> None:
        if self.begun < self._budget:
            self.begun += 1
            attempt = _Attempt(place, time.monotonic() + self._timeout_s)
            self._attempts.append(attempt)
            threading.Thread(target=self._work, args=[attempt], name=f"start {place.what}", daemon=True).start()
            return
        if self._attempts:
            self._waiting.append(_Place(place.what, place.start, waited=place.waited))
        else:
            limit = f"async_training.max_replica_restarts={self._budget}"
            logger.error("%s is not started: %d have been (%s)", place.what, self.begun, limit)
        threading.Thread(target=self._clear_away, args=[place.lost], name="clear a lost replica", daemon=True).start()

    def _work(self, attempt: _Attempt) -> None:
        # The future is cancelled when `take` has given the attempt up.
        try:
            self._clear_away(attempt.place.lost)
            started = attempt.place.start()
        except BaseException as error:  # whatever it is, `take` reports it
            if attempt.result.set_running_or_notify_cancel():
                attempt.result.set_exception(error)
            return
        if attempt.result.set_running_or_notify_cancel():
            logger.warning("%s is up and takes part from the next weight sync on", attempt.place.what)
            attempt.result.set_result(started)
        else:
            self._clear(started)

    def _clear_away(self, lost: Any) -> None:
        """None: nothing is left of it, since another attempt was made in its place."""
        if lost is not None:
            self._clear(lost)

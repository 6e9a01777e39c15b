# SPDX-License-Identifier: Apache-2.0
"""Starts a new replica for each one that a run has lost, beside the run, once what is left of that one is ended.

Contract: nobody waits for it. On a thread of its own the lost one is cleared away, its processes and its resources, and
another one started; `Replacements.take` hands it out when it is up. Each attempt, whether it succeeds or not, counts
against the budget, unless it found no free accelerators: that one is made again, at every `take`, until there are some.
Past the budget, what is lost stays lost, which the log says. An attempt longer than the deadline is given up, and what
it starts after all is cleared away. What clears away returns when Ray says that resources, or names, are free again,
which it does a while after the processes' end.

Shown by tests/integration/test_replacement.py and, with real replicas, tests/e2e/test_replacement.py,
test_lost_replica.py and test_nodes.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

from recipe.async_engine.core.errors import NothingFree

logger = logging.getLogger(__name__)


@dataclass
class _Attempt:
    """To fill one place; ``lost``: what is left of the one before, None when that is cleared away."""

    what: str
    start: Callable[[], Any]
    lost: Any = None
    waited: bool = False
    deadline: float = 0.0
    result: Future[Any] = field(default_factory=Future)

    def again(self, waited: bool) -> _Attempt:
        """Another one for the same place."""
        return _Attempt(self.what, self.start, waited=waited)


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
        self._waiting: list[_Attempt] = []

    @property
    def under_way(self) -> int:
        """Replicas that are being started, or are up and wait for the next weight sync."""
        return len(self._attempts)

    def begin(self, what: str, lost: Any, start: Callable[[], Any]) -> None:
        """Have ``start`` make another replica in the place of ``lost``; ``what`` names it in the log.

        A ``start`` that raises NothingFree is asked again later.
        """
        self._fill(_Attempt(what, start, lost))

    def take(self) -> list[Any]:
        """Replicas that came up since the last call; they hold no weights yet."""
        attempts, self._attempts, ready = self._attempts, [], []
        again, self._waiting = self._waiting, []
        for attempt in attempts:
            what = attempt.what
            if not attempt.result.done():
                if time.monotonic() > attempt.deadline and attempt.result.cancel():
                    logger.error("%s could not be started: not up after %g s", what, self._timeout_s)
                else:
                    self._attempts.append(attempt)
            elif (error := attempt.result.exception()) is None:
                ready.append(attempt.result.result())
            else:
                waits = isinstance(error, NothingFree)
                again.append(attempt.again(waits))
                if not waits:
                    logger.error("%s could not be started: %s", what, error)
                    continue
                self.begun -= 1
                if not attempt.waited:
                    logger.error("%s waits, and is tried again at each weight sync: %s", what, error)
        for attempt in again:
            self._fill(attempt)
        return ready

    def _fill(self, attempt: _Attempt) -> None:
        what = attempt.what
        if self.begun < self._budget:
            self.begun += 1
            attempt.deadline = time.monotonic() + self._timeout_s
            self._attempts.append(attempt)
            threading.Thread(target=self._work, args=[attempt], name=f"start {what}", daemon=True).start()
            return
        if self._attempts:
            self._waiting.append(attempt.again(attempt.waited))
        else:
            limit = f"async_training.max_replica_restarts={self._budget}"
            logger.error("%s is not started: %d have been (%s)", what, self.begun, limit)
        threading.Thread(target=self._clear_away, args=[attempt.lost], name="clear a lost replica", daemon=True).start()

    def _work(self, attempt: _Attempt) -> None:
        # The future is cancelled when `take` has given the attempt up.
        try:
            self._clear_away(attempt.lost)
            started = attempt.start()
        except BaseException as error:  # whatever it is, `take` reports it
            if attempt.result.set_running_or_notify_cancel():
                attempt.result.set_exception(error)
            return
        if attempt.result.set_running_or_notify_cancel():
            logger.warning("%s is up and takes part from the next weight sync on", attempt.what)
            attempt.result.set_result(started)
        else:
            self._clear(started)

    def _clear_away(self, lost: Any) -> None:
        """Clear it away unless nothing is left of it, since another attempt was made in its place."""
        if lost is not None:
            self._clear(lost)


CLEARED_S = 60.0
POLL_S = 0.05


def clear_replica(replica: Any, timeout_s: float = CLEARED_S) -> None:
    """End a replica with resources of its own, and give those back; TimeoutError if Ray does not count them as free.

    verl starts nothing where it finds too few accelerators, and does not wait for them
    (single_controller/ray/base.py:239).
    """
    _kill([*replica.servers, *replica.workers])
    groups = (replica.resource_pool.pgs if replica.resource_pool else None) or ()
    for group in groups:
        remove_placement_group(group)
    what = "Ray did not free the resources of a lost replica, placement groups {},"
    _wait_until_none(lambda: _holding_resources(groups), what, timeout_s)


@contextmanager
def cleared_on_failure(replicas: Sequence[Any]) -> Iterator[None]:
    """Clear away replicas whose start fails: the resources that one has by then are needed by the next attempt."""
    try:
        yield
    except BaseException:
        for replica in replicas:
            try:
                clear_replica(replica)
            except Exception:  # the failure of the start is the one to report
                logger.exception("what is left of number %s was not cleared away", replica.replica_rank)
        raise


def end_servers(replica: Any, timeout_s: float) -> None:
    """End the server actors of a replica; returns when their names are free, or raises TimeoutError."""
    prefix = replica._get_server_name_prefix()
    names = [f"{prefix}server_{replica.replica_rank}_{node}" for node in range(replica.nnodes)]
    _kill(replica.servers)
    _wait_until_none(lambda: [name for name in names if _is_taken(name)], "rollout servers {} did not end", timeout_s)


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        with suppress(Exception):  # it is dead already, in one way or another
            ray.kill(actor)


def _wait_until_none(left: Callable[[], Sequence[str]], what: str, timeout_s: float) -> None:
    """``what``: names those that are left, at its braces, when the time is over."""
    deadline = time.monotonic() + timeout_s
    while names := left():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what.format(', '.join(names))} within {timeout_s:g} s")
        time.sleep(POLL_S)


def _holding_resources(groups: Sequence[PlacementGroup]) -> list[str]:
    """A group's resources have names with its id in them, and the node's own are less by as much."""
    resources = list(ray.available_resources()) if groups else []
    ids = [group.id.hex() for group in groups]
    return [group for group in ids if any(group in name for name in resources)]


def _is_taken(name: str) -> bool:
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True

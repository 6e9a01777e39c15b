# SPDX-License-Identifier: Apache-2.0
"""Starts a new replica for each replica that a run has lost, while the run continues.

Contract: the run never waits for a replacement. A thread ends the processes of the lost replica, frees its resources
and starts another replica; `Replacements.take` returns the new replica when it is up. Each attempt counts against a
budget, even if it fails, except an attempt that finds no free accelerators: that one is repeated at every `take`. When
the budget is spent, a lost replica is not replaced, and the log says so. An attempt that exceeds its deadline is given
up and another one begins; if a given-up attempt brings up a replica later, that replica is ended. Functions that end a
replica wait until Ray reports the replica's resources, or its actor names, as free, which happens some time after the
processes have ended. Shown by tests/integration/test_replacement.py and, with real replicas,
tests/e2e/test_replacement.py, test_lost_replica.py and test_nodes.py.
"""

from __future__ import annotations

import asyncio
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

from recipe.async_engine.actors.control import has_ended
from recipe.async_engine.core.deadlines import CLEARED_S
from recipe.async_engine.core.errors import NothingFree

logger = logging.getLogger(__name__)


@dataclass
class _Attempt:
    """One attempt to replace a replica.

    ``lost`` is the lost replica, which this attempt ends first; None if it has been ended, or is being ended, already.
    """

    what: str
    start: Callable[[], Any]
    lost: Any = None
    waited: bool = False
    deadline: float = 0.0
    result: Future[Any] = field(default_factory=Future)

    def again(self, waited: bool) -> _Attempt:
        return _Attempt(self.what, self.start, waited=waited)


@dataclass
class Restarts:
    """The run's budget of attempts to replace lost replicas and servers.

    Attributes:
        most: number of attempts that are allowed in the run.
        begun: number of attempts so far, without those that found no free accelerators.
    """

    most: int
    begun: int = 0

    def begin(self) -> bool:
        """If the budget allows one more attempt, count it and return True; otherwise return False."""
        if self.begun >= self.most:
            return False
        self.begun += 1
        return True


class Replacements:
    """Replaces lost replicas as the module's contract describes.

    Args:
        restarts: the run's budget.
        timeout_s: seconds that one attempt may take.
        clear: ends the remaining processes of a lost replica and frees its resources.
    """

    def __init__(self, restarts: Restarts, timeout_s: float, clear: Callable[[Any], None]) -> None:
        self._restarts = restarts
        self._timeout_s = timeout_s
        self._clear = clear
        self._attempts: list[_Attempt] = []
        # Attempts that exceed the budget. They begin if a running attempt turns out not to count against the budget.
        self._waiting: list[_Attempt] = []

    @property
    def under_way(self) -> int:
        """Number of replicas that are being started, or are up and wait for `take`."""
        return len(self._attempts)

    def begin(self, what: str, lost: Any, start: Callable[[], Any]) -> None:
        """Replace the replica ``lost`` by the one that ``start`` returns; ``what`` names the new replica in the log.

        If ``start`` raises an error, the next `take` starts a new attempt, if the budget allows it. An attempt that
        raised NothingFree does not count against the budget.
        """
        self._fill(_Attempt(what, start, lost))

    def take(self) -> list[Any]:
        """Return the replicas that came up since the last call; they hold no weights yet."""
        attempts, self._attempts, ready = self._attempts, [], []
        again, self._waiting = self._waiting, []
        for attempt in attempts:
            what = attempt.what
            if not attempt.result.done():
                if time.monotonic() > attempt.deadline and attempt.result.cancel():
                    logger.error("%s could not be started: not up after %g s", what, self._timeout_s)
                    again.append(attempt.again(False))
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
                self._restarts.begun -= 1
                if not attempt.waited:
                    logger.error("%s waits, and is tried again at each weight sync: %s", what, error)
        for attempt in again:
            self._fill(attempt)
        return ready

    def _fill(self, attempt: _Attempt) -> None:
        what = attempt.what
        if self._restarts.begin():
            attempt.deadline = time.monotonic() + self._timeout_s
            self._attempts.append(attempt)
            threading.Thread(target=self._work, args=[attempt], name=f"start {what}", daemon=True).start()
            return
        if self._attempts:
            self._waiting.append(attempt.again(attempt.waited))
        else:
            limit = f"async_training.max_replica_restarts={self._restarts.most}"
            logger.error("%s is not started: the run has made %d attempts (%s)", what, self._restarts.begun, limit)
        threading.Thread(target=self._clear_away, args=[attempt.lost], name="clear a lost replica", daemon=True).start()

    def _work(self, attempt: _Attempt) -> None:
        # `take` gives up an attempt by cancelling `attempt.result`. After that, an error of this attempt is ignored,
        # and a replica that this attempt has started is ended.
        try:
            self._clear_away(attempt.lost)
            started = attempt.start()
        except BaseException as error:  # `take` reports any error
            if attempt.result.set_running_or_notify_cancel():
                attempt.result.set_exception(error)
            return
        if attempt.result.set_running_or_notify_cancel():
            logger.warning("%s is up, and joins next", attempt.what)
            attempt.result.set_result(started)
        else:
            self._clear(started)

    def _clear_away(self, lost: Any) -> None:
        if lost is not None:
            self._clear(lost)


POLL_S = 0.05


def clear_replica(replica: Any, timeout_s: float = CLEARED_S) -> None:
    """End a replica and wait until Ray reports its resources as free.

    Without this wait, verl could refuse to start the next replica for lack of free accelerators
    (single_controller/ray/base.py:239).

    Raises:
        TimeoutError: the resources are not free after ``timeout_s`` seconds.
    """
    _kill([*replica.servers, *replica.workers])
    groups = (replica.resource_pool.pgs if replica.resource_pool else None) or ()
    for group in groups:
        remove_placement_group(group)
    what = "Ray did not free the resources of a lost replica, placement groups {},"
    _wait_until_none(lambda: _holding_resources(groups), what, timeout_s)


def end_processes(replica: Any, timeout_s: float = CLEARED_S) -> None:
    """End a replica's actors, but leave its placement groups to its replacement; raise TimeoutError if one stays."""

    async def all_ended() -> None:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*map(has_ended, actors))

    actors = [*replica.servers, *replica.workers]
    _kill(actors)
    asyncio.run(all_ended())


@contextmanager
def cleared_on_failure(replicas: Sequence[Any]) -> Iterator[None]:
    """End ``replicas`` if the ``with`` block, which starts them, fails: the next attempt needs their resources."""
    try:
        yield
    except BaseException:
        for replica in replicas:
            try:
                clear_replica(replica)
            except Exception:  # only log this error: the caller gets the error of the failed start
                logger.exception("replica %s, which failed to start, could not be ended", replica.replica_rank)
        raise


def end_servers(replica: Any, timeout_s: float) -> None:
    """End a replica's server actors and wait until Ray no longer knows their names.

    Raises:
        TimeoutError: Ray still knows some of the names after ``timeout_s`` seconds.
    """
    prefix = replica._get_server_name_prefix()
    names = [f"{prefix}server_{replica.replica_rank}_{node}" for node in range(replica.nnodes)]
    _kill(replica.servers)
    _wait_until_none(lambda: [name for name in names if _is_taken(name)], "rollout servers {} did not end", timeout_s)


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        with suppress(Exception):  # an actor that is already dead cannot be killed
            ray.kill(actor)


def _wait_until_none(left: Callable[[], Sequence[str]], what: str, timeout_s: float) -> None:
    """Wait until ``left`` returns no names; after ``timeout_s`` seconds raise a TimeoutError with the names left.

    The error's message is ``what``, in which ``{}`` stands for these names, followed by "within <timeout_s> s".
    """
    deadline = time.monotonic() + timeout_s
    while names := left():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what.format(', '.join(names))} within {timeout_s:g} s")
        time.sleep(POLL_S)


def _holding_resources(groups: Sequence[PlacementGroup]) -> list[str]:
    """Return the ids of those ``groups`` that still hold resources. Ray's names of such resources contain the id."""
    resources = list(ray.available_resources()) if groups else []
    ids = [group.id.hex() for group in groups]
    return [group for group in ids if any(group in name for name in resources)]


def _is_taken(name: str) -> bool:
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True

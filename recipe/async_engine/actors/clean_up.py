# SPDX-License-Identifier: Apache-2.0
"""Ends what is left of a replica, so that another one can be started with what it had: its resources, or its names.

Contract: each function returns when Ray says that these are free again, which it does a while after the processes' end.
Shown by tests/integration/test_replacement.py and tests/e2e/test_lost_replica.py.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

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

# SPDX-License-Identifier: Apache-2.0
"""Keeps the state of each replica that receives weights, and tells the load balancer which replicas get requests.

Contract: every call to a replica has a deadline, and a replica that fails or is late is treated as dead from then on.
Shown by tests/integration/test_publisher.py and test_hybrid_publisher.py.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplica

from recipe.async_engine.actors.control import sign_of_life

logger = logging.getLogger(__name__)


def plain_cause(error: BaseException) -> BaseException:
    """Return the error inside Ray's wrapper ``error``, or ``error`` itself if it is no wrapper.

    The wrapper's text has the remote traceback, which is in the log already.
    """
    return getattr(error, "cause", None) or error


def generates(replica: RolloutReplica) -> bool:
    """Return whether ``replica`` is a rollout replica and not a log-prob server."""
    return getattr(replica, "generates", True)


@dataclass
class ReplicaRecord:
    """A rollout replica or log-prob server, and its state as the publisher knows it.

    Only rollout replicas get requests from the load balancer (``routed``). Only log-prob servers can be ``absent``:
    if a server does not answer, the sync continues without it, and the next sync tries it again.
    """

    replica: RolloutReplica
    routed: bool = False
    absent: bool = False
    dead: bool = False
    error: BaseException | None = None

    @property
    def generates(self) -> bool:
        return generates(self.replica)

    @property
    def name(self) -> str:
        kind = "replica" if self.generates else "log-prob server"
        return f"{kind} {self.replica.replica_rank}"

    @property
    def server_id(self) -> str:
        """The replica's name in the load balancer."""
        return self.replica.server_address


async def ping(record: ReplicaRecord) -> None:
    """Wait until all processes of a replica have answered a call."""
    workers = [worker.__ray_call__.remote(lambda worker: None) for worker in record.replica.workers]
    servers = [sign_of_life(server).remote() for server in record.replica.servers]
    await asyncio.gather(*workers, *servers)


Action = Callable[[ReplicaRecord], Awaitable[Any]]


class ReplicaSet:
    """All rollout replicas and log-prob servers that receive weights.

    By default a call to one of them may take ``timeout_s`` seconds.
    """

    def __init__(self, replicas: list[RolloutReplica], load_balancer: ray.actor.ActorHandle, timeout_s: float) -> None:
        self.records = [ReplicaRecord(replica) for replica in replicas]
        self.load_balancer = load_balancer
        self.timeout_s = timeout_s

    @property
    def present(self) -> list[ReplicaRecord]:
        return [record for record in self.records if not record.dead and not record.absent]

    @property
    def errors(self) -> str:
        errors = [f"{record.name}: {plain_cause(record.error)}" for record in self.records if record.error is not None]
        return "; ".join(errors) or "no replica reported an error"

    async def each(
        self,
        what: str,
        records: Iterable[ReplicaRecord],
        action: Action,
        timeout_s: float | None = None,
        or_absent: bool = False,
    ) -> None:
        """Run ``action`` for all ``records`` concurrently.

        A replica whose action fails or is late is marked as dead; with ``or_absent`` a late one is marked as absent
        instead. ``what`` describes the action in error messages, as in "did not <what> within 5 s".
        """
        timeout_s = timeout_s or self.timeout_s

        async def guarded(record: ReplicaRecord) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await action(record)
                record.absent = False
                return
            except TimeoutError:
                if or_absent:
                    record.absent = True
                    logger.warning("%s does not answer: this weight sync goes on without it", record.name)
                    return
                record.error = TimeoutError(f"did not {what} within {timeout_s:g} s")
            except Exception as error:  # A replica may fail in any way; the others go on without it.
                record.error = error
            record.dead = True
            logger.error("%s is given up: %s", record.name, record.error)

        await asyncio.gather(*[guarded(record) for record in records])

    async def route(self, records: Iterable[ReplicaRecord]) -> None:
        """Add the rollout replicas among ``records`` to the load balancer, unless they are in it already."""
        fresh = [record for record in records if record.generates and not record.routed]
        if fresh:
            servers = {record.server_id: record.replica.server_handle for record in fresh}
            await self._balanced(self.load_balancer.add_servers.remote(servers))
        for record in fresh:
            record.routed = True

    async def unroute(self, records: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
        """Remove the rollout replicas among ``records`` from the load balancer; return those that were in it."""
        records = [record for record in records if record.generates]
        leaving = [record for record in records if record.routed]
        for record in records:
            record.routed = False
        if records:
            servers = [record.server_id for record in records]
            await self._balanced(self.load_balancer.remove_servers.remote(servers))
        return leaving

    async def _balanced(self, answer: Any) -> None:
        # The deadline must not be short: at the first sync the load balancer's process may still import modules.
        try:
            async with asyncio.timeout(self.timeout_s):
                await answer
        except TimeoutError:
            late = f"the load balancer did not answer within {self.timeout_s:g} s (async_training.timeouts.weight_sync)"
            raise TimeoutError(late) from None

# SPDX-License-Identifier: Apache-2.0
"""The weight publisher for hybrid replicas, whose engines are on the trainer's accelerators and sleep while it trains.

Contract: engines generate only between :meth:`wake` and :meth:`sleep`. `wake` publishes a version: `swap` allocates the
engines' memory again and loads the weights, which each trainer rank passes to the engine on its accelerator, and
`resume` begins generation. `sleep` interrupts all requests, and then the engines free their memory. Requests that reach
a server of a sleeping engine are returned unanswered, so no request waits at a server while the trainer works. A
replica that died gets no requests. The next `wake` first restarts it on the same accelerators, within the restart
budget, since every trainer rank needs an engine to which it can pass its weights.

FSDP ranks gather their weights from the same shards, so all ranks must pass identical weights; otherwise the run ends.
Each Megatron rank passes its own copy of parameters that are not sharded (norms, biases, routers), and these copies
may differ in single bits. Therefore a difference is not an error with Megatron: the first one is logged.

Shown by tests/integration/test_hybrid_publisher.py, tests/e2e/test_partial_rollout.py, test_elastic.py and
test_lost_replica.py.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from verl.workers.rollout.replica import RolloutReplica

from recipe.async_engine.actors.replacement import Restarts, end_servers
from recipe.async_engine.core.deadlines import PING_S, SERVERS_END_S
from recipe.async_engine.weights.publisher import NoReplicaLeft, PublishFailed, StagedVersion, WeightPublisher
from recipe.async_engine.weights.replica_set import Action, ReplicaRecord
from recipe.async_engine.weights.transfer_group import ChecksumMismatch

logger = logging.getLogger(__name__)


class CannotRestart(PublishFailed):
    """A lost replica cannot be started again, so a trainer rank has no engine to which it can pass its weights."""


class HybridPublisher(WeightPublisher):
    """Wakes replicas with the trainer's weights, and puts them to sleep.

    Attributes:
        restarts: the run's budget for restarting lost replicas.
    """

    restarts: Restarts
    ranks_agree = True
    """Whether all trainer ranks must pass identical weights; False for Megatron."""
    _told_of_difference = False
    _restart: Callable[[RolloutReplica], RolloutReplica]

    def restart_lost(self, restart: Callable[[RolloutReplica], RolloutReplica], restarts: Restarts) -> None:
        """From now on, restart lost replicas with the function ``restart``, within the budget ``restarts``.

        ``restart`` gets a lost replica, starts its replacement, and returns the replacement when it is up.
        """
        self._restart, self.restarts = restart, restarts

    def wake(self, version: int) -> dict[str, float]:
        """Load the trainer's weights into the replicas as ``version``, and add the replicas to the load balancer.

        Returns:
            The metrics of a weight sync.

        Raises:
            NoReplicaLeft: no replica is alive.
            CannotRestart: a lost replica could not be started again.
            PublishFailed: the weights did not arrive.
        """
        staged = self.stage(version)
        self.swap(staged)
        return self.resume(staged)

    def sleep(self, others_serve: bool = False) -> float:
        """Interrupt the replicas' requests and free the engines' memory; kill the servers that do not do so in time.

        If other replicas go on generating (``others_serve``), the load balancer first stops routing requests to the
        replicas that go to sleep. A request that still reaches one of these is returned unanswered.

        Returns:
            The seconds until all engines have stopped generating.
        """
        began = time.monotonic()
        if others_serve:
            asyncio.run(self.known.unroute([record for record in self.known.records if record.routed]))
        self._each("stop generating", lambda record: record.replica.abort_all_requests(reject_request=True))
        seconds = time.monotonic() - began
        self._each("free its memory", lambda record: record.replica.sleep())
        asyncio.run(self._unroute_dead())
        for record in (record for record in self.known.records if record.dead):
            # A replica that counts as dead may merely be slow, and would keep the memory that the trainer needs.
            end_servers(record.replica, SERVERS_END_S)
        return seconds

    def spread(self, servers: Sequence[Any]) -> None:
        """Make ``servers`` return the requests that have no sampled token yet. Clients then send them elsewhere."""
        asyncio.run(self._spread(servers))

    async def _spread(self, servers: Sequence[Any]) -> None:
        asked = [server.give_back_waiting.remote() for server in servers]
        # The load balancer's cache ties each conversation to one server. Clear it, so that conversations can move.
        answers = await self.outcomes([self.known.load_balancer.clear_sticky_cache.remote(), *asked])
        for error in (answer for answer in answers if isinstance(answer, BaseException)):
            logger.warning("requests may be spread unevenly over the rollout replicas: %s", error)

    def _each(self, what: str, action: Action, timeout_s: float | None = None) -> None:
        asyncio.run(self.known.each(what, self.known.present, action, timeout_s))

    def find_dead(self) -> str:
        """Check whether each replica's servers and engines are alive; return the errors of dead replicas as text."""
        self._each("answer", self._check_engine, PING_S)
        asyncio.run(self._unroute_dead())
        return self.known.errors

    @staticmethod
    async def _check_engine(record: ReplicaRecord) -> None:
        await asyncio.gather(*[server.check_engine.remote() for server in record.replica.servers])

    def stage(self, version: int) -> StagedVersion:
        """Restart lost replicas. No weights are staged: sleeping engines have no memory, so `swap` loads them in place.

        Raises:
            CannotRestart: a lost replica could not be restarted, or the restart budget is used up.
        """
        cause = self.find_dead()
        for lost in self.take_lost():
            self.add_replicas([self._in_place_of(lost, cause)])
        return StagedVersion(version)

    def _in_place_of(self, lost: RolloutReplica, cause: str) -> RolloutReplica:
        if not self.restarts.begin():
            raise CannotRestart(
                f"rollout replica {lost.replica_rank} died ({cause}) after {self.restarts.begun} restarts in this run, "
                f"all that async_training.max_replica_restarts={self.restarts.most} allows"
            )
        logger.warning("rollout replica %d died and is started again: %s", lost.replica_rank, cause)
        try:
            return self._restart(lost)
        except Exception as error:  # any error prevents the restart
            what = f"rollout replica {lost.replica_rank} died ({cause}) and could not be started again"
            raise CannotRestart(f"{what}: {error}") from error

    async def _swap(self, staged: StagedVersion) -> None:
        version = staged.version
        outcomes = await self.outcomes(self.actor_wg.update_weights(global_steps=version, mode=self.backend))
        error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if error is not None:
            raise PublishFailed(f"version {version} did not reach every replica: {error}") from error
        checksums = [outcome for outcome in outcomes if outcome is not None]
        if len(set(checksums)) > 1:
            self._judge_difference(version, checksums)
        self.checksum = next(iter(checksums), None)

    def _judge_difference(self, version: int, checksums: list[str]) -> None:
        if self.ranks_agree:
            raise ChecksumMismatch(f"trainer ranks loaded different weights of version {version}: {checksums}")
        if not self._told_of_difference:
            self._told_of_difference = True
            logger.warning(
                "version %d: the trainer's %d ranks passed on %d different sets of weights. Copies of unsharded "
                "parameters may differ in single bits; larger differences show in training/rollout_probs_diff_max",
                version,
                len(checksums),
                len(set(checksums)),
            )

    async def _resume(self, staged: StagedVersion) -> None:
        # When the weights were loaded, the engines allocated all their memory again, including the KV cache, so only
        # generation has to be resumed.
        await self.known.each("resume", self.known.present, lambda record: record.replica.resume_generation())
        await self.known.route(self.known.present)
        await self._unroute_dead()
        if not self.live_replicas:
            raise NoReplicaLeft(f"no rollout replica is alive: {self.known.errors}")

    async def _unroute_dead(self) -> None:
        """Remove dead replicas from the load balancer. Requests that are at these replicas fail by themselves."""
        await self.known.unroute([record for record in self.known.records if record.dead and record.routed])

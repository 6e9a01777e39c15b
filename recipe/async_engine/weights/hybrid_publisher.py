# SPDX-License-Identifier: Apache-2.0
"""The weight publisher for hybrid replicas, whose engines are on the trainer's accelerators and sleep while it trains.

Contract: engines generate only between :meth:`begin_generation` and :meth:`pause`. `pause` returns when every live
engine has returned its requests. Requests that reach a server later are returned unanswered, so no request waits at a
server during the trainer's turn. :meth:`release` then frees the replicas' memory for the trainer. :meth:`swap`
allocates the memory again and loads new weights, which each trainer rank passes to the engine on its accelerators. The
version is announced when all replicas have committed it. A replica that died gets no requests for the rest of the turn.
The next publication first restarts it on the same accelerators, within the restart budget, since every trainer rank
needs an engine to which it passes weights.

FSDP ranks gather their weights from the same shards, so all must pass identical weights; otherwise the run ends.
Megatron ranks each pass their own copy of parameters that are not sharded (norms, biases, routers), and these copies
may differ in single bits; with Megatron a difference is only logged, once.

If other replicas generate meanwhile (``placement=elastic``), :meth:`wake` and :meth:`sleep` also change the routing.

Shown by tests/integration/test_hybrid_publisher.py, tests/e2e/test_partial_rollout.py, test_elastic.py and
test_lost_replica.py.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from verl.workers.rollout.replica import RolloutReplica

from recipe.async_engine.actors.replacement import end_servers
from recipe.async_engine.core.deadlines import PING_S, SERVERS_END_S
from recipe.async_engine.weights.publisher import NoReplicaLeft, PublishFailed, StagedVersion, WeightPublisher
from recipe.async_engine.weights.replica_set import Action, ReplicaRecord
from recipe.async_engine.weights.transfer_group import ChecksumMismatch

logger = logging.getLogger(__name__)


class CannotRestart(PublishFailed):
    """A lost replica cannot be started again, so its trainer rank has no engine to which it could pass weights."""


class HybridPublisher(WeightPublisher):
    """Publishes weights between a turn of the trainer and a turn of the rollout.

    Attributes:
        is_awake: whether the engines have their memory allocated, including the weights.
    """

    is_awake = True

    ranks_agree = True
    """Whether all trainer ranks must pass identical weights; False for Megatron."""
    _told_of_difference = False
    _restart: Callable[[RolloutReplica], RolloutReplica]
    _budget = _restarts = 0

    def restart_lost(self, restart: Callable[[RolloutReplica], RolloutReplica], budget: int) -> None:
        """Use ``restart``, which returns when a replica is up, to restart lost replicas, at most ``budget`` times."""
        self._restart, self._budget = restart, budget

    @property
    def restarts(self) -> int:
        return self._restarts

    def begin_generation(self) -> None:
        """Resume generation on all live replicas and route requests to them; raise NoReplicaLeft if none is alive."""
        asyncio.run(self._begin())

    async def _begin(self) -> None:
        # The engines' memory, including the KV cache, was allocated again when the weights were loaded.
        await self.known.each("resume", self.known.present, lambda record: record.replica.resume_generation())
        await self.known.route(self.known.present)
        await self._unroute_dead()
        if not self.live_replicas:
            raise NoReplicaLeft(f"no rollout replica is alive: {self.known.errors}")

    def pause(self) -> float:
        """Interrupt generation; return the number of seconds until all engines have stopped generating."""
        began = time.monotonic()
        self._each("stop generating", lambda record: record.replica.abort_all_requests(reject_request=True))
        return time.monotonic() - began

    def release(self) -> None:
        """Free the memory of all engines, including their weights."""
        self._each("free its memory", lambda record: record.replica.sleep())
        self.is_awake = False

    def wake(self, version: int) -> None:
        """Load the trainer's weights as ``version``, and have the load balancer route to the replicas.

        Raises:
            NoReplicaLeft: no replica is alive.
            CannotRestart: a lost replica could not be started again.
            PublishFailed: the weights did not arrive.
        """
        self.swap(self.stage(version))
        self.begin_generation()

    def sleep(self) -> None:
        """Take the replicas out of routing, interrupt their requests, and free their memory, by force if need be."""
        asyncio.run(self.known.unroute([record for record in self.known.records if record.routed]))
        self.pause()
        self.release()
        for record in (record for record in self.known.records if record.dead):
            # A replica that counts as dead may only be late, and would keep the memory that the trainer needs.
            end_servers(record.replica, SERVERS_END_S)

    def spread(self, servers: Sequence[Any]) -> None:
        """Have ``servers`` give back the requests that wait there without a token, so that other servers get them."""
        asyncio.run(self._spread(servers))

    async def _spread(self, servers: Sequence[Any]) -> None:
        asked = [server.give_back_waiting.remote() for server in servers]
        # Without a cleared cache, a conversation would stay with its server.
        answers = await self.outcomes([self.known.load_balancer.clear_sticky_cache.remote(), *asked])
        for error in (answer for answer in answers if isinstance(answer, BaseException)):
            logger.warning("requests may be spread unevenly over the rollout replicas: %s", error)

    def _each(self, what: str, action: Action, timeout_s: float | None = None) -> None:
        asyncio.run(self.known.each(what, self.known.present, action, timeout_s))

    def find_dead(self) -> str:
        """Check whether each replica's servers and engines are alive; return the errors of the dead ones as text."""
        self._each("answer", self._check_engine, PING_S)
        asyncio.run(self._unroute_dead())
        return self.known.errors

    @staticmethod
    async def _check_engine(record: ReplicaRecord) -> None:
        await asyncio.gather(*[server.check_engine.remote() for server in record.replica.servers])

    def stage(self, version: int) -> StagedVersion:
        """Restart lost replicas. Nothing is staged: `swap` loads the weights in place, when the memory is free again.

        Raises:
            CannotRestart: a lost replica could not be restarted, or the restart budget is used up.
        """
        cause = self.find_dead()
        for lost in self.take_lost():
            self.add_replicas([self._in_place_of(lost, cause)])
        return StagedVersion(version)

    def _in_place_of(self, lost: RolloutReplica, cause: str) -> RolloutReplica:
        if self._restarts >= self._budget:
            raise CannotRestart(
                f"rollout replica {lost.replica_rank} died ({cause}) after {self._restarts} restarts, as many as "
                f"async_training.max_replica_restarts={self._budget} allows"
            )
        self._restarts += 1
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
        self.is_awake = True

    def _judge_difference(self, version: int, checksums: list[str]) -> None:
        if self.ranks_agree:
            raise ChecksumMismatch(f"trainer ranks loaded different weights of version {version}: {checksums}")
        if not self._told_of_difference:
            self._told_of_difference = True
            logger.warning(
                "version %d: the trainer's %d ranks handed over %d different sets of weights. Copies of what is not "
                "sharded may drift by a bit; more than that shows in training/rollout_probs_diff_max",
                version,
                len(checksums),
                len(set(checksums)),
            )

    async def _resume(self, staged: StagedVersion) -> None:
        """Do nothing, because :meth:`begin_generation` resumes generation at the next turn."""

    async def _unroute_dead(self) -> None:
        """Remove dead replicas from the load balancer; their requests fail by themselves."""
        await self.known.unroute([record for record in self.known.records if record.dead and record.routed])

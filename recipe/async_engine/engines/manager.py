# SPDX-License-Identifier: Apache-2.0
"""Starts the rollout replicas of a run, and the load balancer that distributes requests to them.

Contract: the load balancer starts before the replicas and without servers, so clients can be created immediately. The
weight publisher adds a replica to the load balancer when the replica has a complete version. Before that the replica
gets no requests. A load balancer that dies is not replaced. This package's own load balancer runs on the trainer's
node, so the loss of another node does not end the run.
"""

import asyncio
import itertools
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.router import get_router_handle

from recipe.async_engine.actors.control import with_control
from recipe.async_engine.actors.replacement import cleared_on_failure, end_servers
from recipe.async_engine.core.deadlines import SERVERS_END_S
from recipe.async_engine.engines.load_balancer import HELD, CountingBalancer
from recipe.async_engine.engines.protocol import engine_class
from recipe.async_engine.engines.reservation import Reservations


class ReplicaManager(LLMServerManager):
    """verl's server manager for this package's engines. The replicas start when :meth:`launch` is called."""

    def __init__(
        self,
        config: Any,
        reservations: Reservations | None = None,
        first: int = 0,
        load_balancer: ray.actor.ActorHandle | None = None,
    ) -> None:
        """Create a manager whose replicas are numbered from ``first``, and a load balancer if none is given."""
        engine = engine_class(config.actor_rollout_ref.rollout.name)
        self.rollout_replica_class = partial(engine, reservations=reservations)
        super().__init__(config, start_rank=first)
        self.rollout_replicas: list[RolloutReplica] = []
        self.server_addresses: list[str] = []
        self.global_load_balancer = load_balancer or self._new_load_balancer()

    def _new_load_balancer(self) -> Any:
        """Create the load balancer that the user has configured, or else this package's own, `CountingBalancer`.

        `CountingBalancer` runs on the node of this process, while Ray may place a user's load balancer on any node. In
        `CountingBalancer`, calls that add or remove servers have a concurrency group of their own, so that requests do
        not delay them.
        """
        file = getattr(self.rollout_config, "router_config_path", None)
        hashes = getattr(self.rollout_config, "full_determinism", False)
        if file is None and self._load_balancer_cls is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            balancer = with_control(CountingBalancer, HELD).options(scheduling_strategy=here)
            return balancer.remote(servers={}, full_determinism=hashes)
        return get_router_handle(
            servers={}, router_config_path=file, full_determinism=hashes, load_balancer_cls=self._load_balancer_cls
        )

    def start_another(self) -> RolloutReplica:
        """Start one more replica on free accelerators; return when its server is up, but has no weights yet.

        Raises:
            NothingFree: not enough accelerators are free now.
        """
        replica = self._new_replica(next(self._numbers))
        with cleared_on_failure([replica]):
            asyncio.run(replica.init_standalone())
        return replica

    def start_again(self, lost: RolloutReplica, timeout_s: float) -> RolloutReplica:
        """Start a replacement for ``lost``, a replica on the trainer's accelerators, with the same name and ranks.

        The replacement that is returned has no weights yet.

        Raises:
            TimeoutError: the replacement was not up in time, or ``lost`` did not end.
        """
        end_servers(lost, SERVERS_END_S)
        replica = self._new_replica(lost.replica_rank)

        async def start() -> None:
            async with asyncio.timeout(timeout_s):
                await replica.init_hybrid(self.worker_group)

        asyncio.run(start())
        return replica

    def _new_replica(self, number: int) -> RolloutReplica:
        per_node = self.rollout_config.n_gpus_per_node
        return self.rollout_replica_class(number, self.rollout_config, self.model_config, per_node)

    def launch(self, worker_group: Any = None) -> None:
        """Start the servers of all replicas and return when all are up.

        ``worker_group`` has the trainer ranks that pass weights to the servers. If it is None, each replica starts
        weight workers for this.
        """
        self.worker_group = worker_group
        asyncio.run(self._initialize_llm_servers())
        # The names of servers and sockets contain the replica's number, so no number may be used twice in a run.
        self._numbers = itertools.count(self.start_rank + len(self.rollout_replicas))

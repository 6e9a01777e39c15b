# SPDX-License-Identifier: Apache-2.0
"""The rollout replicas of a run and the load balancer in front of them.

Contract: the load balancer starts empty and before the replicas: clients can be made at once, and a replica receives
requests only after the weight publisher has reported that it holds a complete version. A load balancer that dies is not
replaced, so this package's is on the trainer's node: the loss of another node then does not end the run.
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
    """verl's server manager for the run's rollout engine, used in two steps: construct it, then call :meth:`launch`."""

    def __init__(self, config: Any, reservations: Reservations | None = None) -> None:
        engine = engine_class(config.actor_rollout_ref.rollout.name)
        self.rollout_replica_class = partial(engine, reservations=reservations)
        super().__init__(config)
        self.global_load_balancer = self._new_load_balancer()

    def _new_load_balancer(self) -> Any:
        """Create the user's load balancer, or this package's.

        This package's adds and removes servers in a concurrency group of its own, beside the calls of requests. It is
        placed on the node of this process, whereas Ray may place verl's on any node.
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
        """Start one more replica, on resources of its own; return when its server is up, without weights.

        Raises NothingFree if there are no such resources now.
        """
        replica = self._new_replica(next(self._numbers))
        with cleared_on_failure([replica]):
            asyncio.run(replica.init_standalone())
        return replica

    def start_again(self, lost: RolloutReplica, timeout_s: float) -> RolloutReplica:
        """Start a replica in the place of ``lost``, with the same name and the same trainer ranks.

        Returns when its server is up, without weights. Raises TimeoutError if it is late, or if ``lost`` does not end.
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
        """Start every replica's servers, with new weight workers or, if given, those of ``worker_group``.

        Returns when all replicas are up.
        """
        self.worker_group = worker_group
        asyncio.run(self._initialize_llm_servers())
        # Server and socket names contain the number, so each replica of a run gets a number of its own.
        self._numbers = itertools.count(self.start_rank + len(self.rollout_replicas))

# SPDX-License-Identifier: Apache-2.0
"""The rollout replicas of a run and the load balancer in front of them.

Contract: the load balancer is up before the replicas are, and empty: clients can be made at once, and a replica is
routed to only when the weight publisher says that it holds a complete version. Nothing takes its place when it dies, so
verl's is on the node of the process that makes it, the trainer's: no other node's loss ends the run with it.
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
from recipe.async_engine.engines.load_balancer import HELD, CountingBalancer
from recipe.async_engine.engines.protocol import engine_class
from recipe.async_engine.engines.reservation import Reservations

END_S = 30.0


class ReplicaManager(LLMServerManager):
    """verl's server manager over the run's rollout engine, in two steps: construct, then :meth:`launch`."""

    def __init__(self, config: Any, reservations: Reservations | None = None) -> None:
        engine = engine_class(config.actor_rollout_ref.rollout.name)
        self.rollout_replica_class = partial(engine, reservations=reservations)
        super().__init__(config)
        self.global_load_balancer = self._new_load_balancer()

    def _new_load_balancer(self) -> Any:
        """verl's, or the user's; verl's own takes and gives back servers beside the requests that wait for one.

        It is on the node of this process; Ray puts verl's on any.
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
        """One more replica, on resources of its own; returns when its server is up, holding no weights.

        NothingFree: there are no such resources now.
        """
        replica = self._new_replica(next(self._numbers))
        with cleared_on_failure([replica]):
            asyncio.run(replica.init_standalone())
        return replica

    def start_again(self, lost: RolloutReplica, timeout_s: float) -> RolloutReplica:
        """A replica in the place of ``lost``, beside the same trainer ranks and with the same name.

        Returns when its server is up, holding no weights; TimeoutError if it is not in time, or ``lost`` did not end.
        """
        end_servers(lost, END_S)
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
        """Start every replica's servers, and its workers or those of ``worker_group``, which it then shares.

        Returns when all of them are up.
        """
        self.worker_group = worker_group
        asyncio.run(self._initialize_llm_servers())
        # Names of servers and sockets have the number in them: no two replicas of a run have the same.
        self._numbers = itertools.count(self.start_rank + len(self.rollout_replicas))

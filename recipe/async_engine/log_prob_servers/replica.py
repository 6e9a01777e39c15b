# SPDX-License-Identifier: Apache-2.0
"""The resources and the life of one log-prob server.

Contract: to the weight publisher it is a replica like those that generate, with workers that receive weights; what a
sync does to generation (abort, caches, resume) means nothing to it, and it is never routed to. Where its ranks take
weights by collectives on a device, they compute nothing meanwhile, nor while they join the others: the engine's
collectives and those of the transfer, which each rank would start in an order of its own, may wait for each other for
ever. Shown by tests/integration/test_model_engine_server.py, test_sync_order.py and tests/e2e/test_model_engine.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.single_controller.ray import RayClassWithInitArgs

from recipe.async_engine.actors.control import with_control
from recipe.async_engine.core.scoring import STATIC, ScoringSettings
from recipe.async_engine.engines.reservation import Reservations, ReservedReplica
from recipe.async_engine.log_prob_servers.adapter import WorkerSettings
from recipe.async_engine.log_prob_servers.server import ModelEngineServer
from recipe.async_engine.log_prob_servers.worker import ModelEngineWorker
from recipe.async_engine.weights.engine_parts import HOST_BACKEND

HELD = ("score",)
"""What keeps calls of a server open: weights wait for none of them."""
CONTROLS = (
    "pause_serving",
    "resume_serving",
    "joined",
    "staged",
    "load_failed",
    "refuse",
    "describe",
    "account",
    "activity",
)


class ModelEngineReplica(ReservedReplica):
    """See the module's contract.

    Args:
        replica_rank: number of the server.
        config: verl's rollout configuration, for its checkpoint engine; its parallel sizes are not read.
        model_config: the policy's.
        ranks: processes of the engine.
        gpus_per_node: accelerators of a node that are for log-prob servers.
        worker: what each rank is told.
        scoring: how the server forms batches and when it moves on.
        reservations: has its accelerators, or finds free ones.
        static: it keeps the weights of the model's files, as version `STATIC`, and gets no others.
    """

    generates = False

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        ranks: int,
        gpus_per_node: int,
        worker: WorkerSettings,
        scoring: ScoringSettings,
        reservations: Reservations,
        static: bool = False,
    ) -> None:
        super().__init__(replica_rank, config, model_config, gpus_per_node, name_suffix="model_engine")
        self.reservations = reservations
        self.world_size = ranks
        self.gpus_per_replica_node = min(gpus_per_node, ranks)
        self.nnodes = ranks // self.gpus_per_replica_node
        self._worker, self._static = worker, static
        on_device = config.checkpoint_engine.backend != HOST_BACKEND
        self._scoring = replace(scoring, holds_for_weights=ranks > 1 and on_device)

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """The workers of this replica."""
        return RayClassWithInitArgs(
            cls=ray.remote(ModelEngineWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
            settings=self._worker,
        )

    async def launch_servers(self) -> None:
        """Start the server beside its first worker."""
        timeout_s = self._worker.timeout_s
        async with asyncio.timeout(timeout_s):
            node = await self.workers[0].__ray_call__.remote(lambda worker: ray.get_runtime_context().get_node_id())
        server = (
            with_control(ModelEngineServer, HELD, CONTROLS)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                max_concurrency=self.max_concurrency,
            )
            .remote(self._scoring, self.workers, timeout_s, STATIC if self._static else None)
        )
        async with asyncio.timeout(timeout_s):
            await server.start.remote()
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*[worker.attach.remote(server) for worker in self.workers])
        self.servers, self._server_handle = [server], server
        self._server_address = f"model_engine_{self.replica_rank}"

    async def pause_serving(self) -> None:
        """Have the server compute nothing until `resume_serving`; requests and weights are taken in."""
        await self._server_handle.pause_serving.remote()

    async def resume_serving(self) -> None:
        await self._server_handle.resume_serving.remote()

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing is generated, and the weights stay where they compute: during a sync the live version answers."""

    abort_all_requests = hold_requests = resume_generation = _nothing
    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing

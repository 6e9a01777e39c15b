# SPDX-License-Identifier: Apache-2.0
"""Log-prob servers from settings to running ones: the resources and the life of each.

Contract: to the weight publisher it is a replica like those that generate, with workers that receive weights; what a
sync does to generation (abort, caches, resume) means nothing to it, and it is never routed to. Where its ranks take
weights by collectives on a device, they compute nothing meanwhile, nor while they join the others: the engine's
collectives and those of the transfer, which each rank would start in an order of its own, may wait for each other for
ever. Shown by tests/integration/test_model_engine_server.py, test_sync_order.py and tests/e2e/test_model_engine.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from omegaconf import OmegaConf, open_dict
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.single_controller.ray import RayClassWithInitArgs
from verl.utils.config import omega_conf_to_dataclass

from recipe.async_engine.actors.control import with_control
from recipe.async_engine.actors.replacement import cleared_on_failure
from recipe.async_engine.config.log_prob_servers import LogProbServers
from recipe.async_engine.core.scoring import STATIC, Anchor, ScoringSettings
from recipe.async_engine.engines.reservation import Reservations, ReservedReplica
from recipe.async_engine.log_prob_servers.adapter import WorkerSettings
from recipe.async_engine.log_prob_servers.server import ModelEngineServer
from recipe.async_engine.log_prob_servers.worker import ModelEngineWorker
from recipe.async_engine.outside import HOST_BACKEND

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


def launch(
    config: Any,
    servers: LogProbServers,
    timeout_s: float,
    reservations: Reservations,
    numbers: Sequence[int] | None = None,
    static: bool = False,
    replica_class: type[ModelEngineReplica] = ModelEngineReplica,
) -> list[ModelEngineReplica]:
    """Start servers; returns when all of them are up, holding the weights of the model's files.

    Args:
        config: the whole configuration.
        servers: its settings of them.
        timeout_s: longest wait of a server for weights and for its ranks.
        reservations: has their accelerators, or finds free ones.
        numbers: of the servers, which no other one has had; None: as many as the settings say, from 0.
        static: they keep these weights.
        replica_class: of each.

    Raises:
        NothingFree: of a server that has none among them, no accelerators are free.
    """
    actor = config.actor_rollout_ref
    worker = WorkerSettings(
        engine=engine_config(config.model_engine_server.engine, servers),
        temperature=float(actor.rollout.temperature),
        host_staging=servers.staging == "host",
        timeout_s=timeout_s,
    )
    replicas = [
        replica_class(
            replica_rank=rank,
            config=actor.rollout,
            model_config=without_adapters(actor.model),
            ranks=servers.ranks,
            gpus_per_node=servers.n_gpus_per_node,
            worker=worker,
            # Of weights that stay, the newest are the only ones.
            scoring=replace(servers.scoring, anchor=Anchor.LATEST) if static else servers.scoring,
            reservations=reservations,
            static=static,
        )
        for rank in (range(servers.replicas) if numbers is None else numbers)
    ]

    async def start() -> None:
        await asyncio.gather(*[replica.init_standalone() for replica in replicas])

    with cleared_on_failure(replicas):
        asyncio.run(start())
    return replicas


def without_adapters(model: Any) -> Any:
    """The policy's model as it is sent: LoRA adapters come merged into its weights."""
    model = OmegaConf.create(OmegaConf.to_container(model, resolve=True))
    with open_dict(model):
        model.lora_rank, model.lora_adapter_path = 0, None
        OmegaConf.update(model, "lora.rank", 0, force_add=True)
    return model


def engine_config(engine: Any, servers: LogProbServers) -> Any:
    engine = OmegaConf.create(OmegaConf.to_container(engine, resolve=True))
    with open_dict(engine):
        engine.param_offload = False
        # verl offloads the parameters of an FSDP2 engine that is forward-only (fsdp/transformer_impl.py:459).
        engine.forward_only = servers.backend == "megatron"
        engine.use_dynamic_bsz = True
        engine.infer_max_token_len_per_gpu = servers.max_batch_tokens
        engine.infer_micro_batch_size_per_gpu = 1
    return omega_conf_to_dataclass(engine)

# SPDX-License-Identifier: Apache-2.0
"""Creates log-prob servers from their settings and manages the resources of each.

Contract: for the weight publisher a server is a replica like those that generate, with workers that receive weights;
the generation calls of a sync (abort, caches, resume) do nothing here, and it is never routed to. If its ranks receive
weights by collectives on a device, they compute nothing at the same time, nor while they join the group: each rank
could start the engine's and the transfer's collectives in a different order, and they would then wait for each other
for ever. Shown by tests/integration/test_model_engine_server.py, test_sync_order.py and tests/e2e/test_model_engine.py.
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
"""Methods whose calls stay open for long; weights do not wait for them."""
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
    """A log-prob server as a replica of verl's.

    Args:
        replica_rank: number of the server.
        config: verl's rollout configuration, for its checkpoint engine; its parallel sizes are not used.
        model_config: the policy's.
        ranks: number of processes of the engine.
        gpus_per_node: accelerators per node that are reserved for log-prob servers.
        worker: settings of each rank.
        scoring: how the server forms batches and when it moves on.
        reservations: provides its accelerators, reserved earlier or free now.
        static: keep the weights of the model's files, as version `STATIC`, and accept no others.
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
        """Return the class of this replica's workers with its arguments."""
        return RayClassWithInitArgs(
            cls=ray.remote(ModelEngineWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
            settings=self._worker,
        )

    async def launch_servers(self) -> None:
        """Start the server on the node of its first worker."""
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
        """Stop computing until `resume_serving`; requests and weights are still accepted."""
        await self._server_handle.pause_serving.remote()

    async def resume_serving(self) -> None:
        await self._server_handle.resume_serving.remote()

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Ignore a call about generation; during a sync the live version answers."""

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
    """Start servers; return when all of them are up with the weights of the model's files.

    Args:
        config: the whole configuration.
        servers: the settings of log-prob servers.
        timeout_s: longest wait of a server for weights and for its ranks.
        reservations: provides their accelerators, reserved earlier or free now.
        numbers: numbers of the servers, never used before; None for as many as the settings say, from 0.
        static: the servers keep these weights.
        replica_class: class of each server.

    Raises:
        NothingFree: nothing was reserved for a server, and no accelerators are free.
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
            # With static weights any request is answered by the only version.
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
    """Return the policy's model configuration without LoRA, because adapters are sent merged into the weights."""
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

# SPDX-License-Identifier: Apache-2.0
"""Creates log-prob servers from their settings and launches them on their own accelerators.

Contract: the weight publisher treats a log-prob server like a rollout replica, with workers that receive weights. The
methods that a weight sync calls to control generation (abort, caches, resume) do nothing here, and the server is not in
the load balancer. If the ranks receive weights by collectives on their devices, scoring stops while they join the
process group and during the transfer. Otherwise ranks could start the collectives of the engine and of the transfer in
different orders, and would wait for each other for ever. Shown by tests/integration/test_model_engine_server.py,
test_sync_order.py and tests/e2e/test_model_engine.py.
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
"""Methods of a server whose calls take long. Calls of its other methods, such as those of a weight sync, need not wait
for these."""
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
    """A log-prob server as a subclass of verl's `RolloutReplica`.

    Args:
        config: verl's rollout configuration, of which only the settings of the checkpoint engine are used.
        ranks: number of the engine's processes.
        gpus_per_node: number of accelerators per node that are reserved for log-prob servers.
        scoring: settings for batches and for the switch to newer weights.
        reservations: provides the server's accelerators, which were reserved earlier or are free now.
        static: whether the server keeps the weights of the model's files, as version `STATIC`, and accepts no others.
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
        return RayClassWithInitArgs(
            cls=ray.remote(ModelEngineWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
            settings=self._worker,
        )

    async def launch_servers(self) -> None:
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
        await self._server_handle.pause_serving.remote()

    async def resume_serving(self) -> None:
        await self._server_handle.resume_serving.remote()

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing, because a log-prob server does not generate."""

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
    """Start log-prob servers with the weights of the model's files, and return when all of them are up.

    Args:
        timeout_s: time limit in seconds of each wait of a server, for weights or for its ranks.
        reservations: provides the servers' accelerators, which were reserved earlier or are free now.
        numbers: numbers of the servers, which must not have been used in this run; None for 0, 1, 2 and so on.
        static: whether the servers never get other weights.

    Raises:
        NothingFree: no accelerators were reserved for a server, and not enough are free.
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
            # A server with static weights has to score every request with its only version.
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
    """Return the policy's model configuration without LoRA, because log-prob servers get merged weights."""
    model = OmegaConf.create(OmegaConf.to_container(model, resolve=True))
    with open_dict(model):
        model.lora_rank, model.lora_adapter_path = 0, None
        OmegaConf.update(model, "lora.rank", 0, force_add=True)
    return model


def engine_config(engine: Any, servers: LogProbServers) -> Any:
    engine = OmegaConf.create(OmegaConf.to_container(engine, resolve=True))
    with open_dict(engine):
        engine.param_offload = False
        # With FSDP2, verl would offload the parameters if this were true (fsdp/transformer_impl.py:459).
        engine.forward_only = servers.backend == "megatron"
        engine.use_dynamic_bsz = True
        engine.infer_max_token_len_per_gpu = servers.max_batch_tokens
        engine.infer_micro_batch_size_per_gpu = 1
    return omega_conf_to_dataclass(engine)

# SPDX-License-Identifier: Apache-2.0
"""From settings to running log-prob servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass

from recipe.async_engine.actors.clean_up import cleared_on_failure
from recipe.async_engine.config.log_prob_servers import LogProbServers
from recipe.async_engine.core.scoring import Anchor
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.log_prob_servers.adapter import WorkerSettings
from recipe.async_engine.log_prob_servers.replica import ModelEngineReplica


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

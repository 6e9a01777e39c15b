# SPDX-License-Identifier: Apache-2.0
"""A minimal second rollout engine: it answers with one number, the sum of its weights.

`recipe.async_engine.engines.protocol` defines its interface. Its servers hold the weights themselves.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.weights.checksum import StreamChecksum


class SumServer:
    """A server with live and staged weights; closed until the first ones have arrived."""

    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self.staged: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.may_answer = asyncio.Event()
        self.routed = True

    async def generate(self, prompt_ids: list[int], request_id: str, **_: Any) -> TokenOutput:
        while self.routed and not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        if not self.routed:
            return TokenOutput(token_ids=[], stop_reason="aborted")
        total = sum(float(tensor.double().sum()) for tensor in self.live.values())
        return TokenOutput(
            token_ids=[round(total)], stop_reason="completed", extra_fields={"global_steps": self.version}
        )

    async def stage(self, weights: dict[str, torch.Tensor]) -> None:
        self.staged = weights

    async def swap(self, version: int, checksum: str) -> None:
        self.live, self.staged, self.version, self.routed = self.staged, {}, version, True

    async def pause(self, paused: bool) -> None:
        if paused or self.version is None:
            self.may_answer.clear()
        else:
            self.may_answer.set()

    async def leave_routing(self) -> None:
        self.routed = False

    async def is_there(self) -> None: ...

    async def wide_parameters(self) -> list[str]:
        return []


class SumWorker:
    """Receives weights through the run's checkpoint engine and stages them at the server."""

    def __init__(self, config: Any, server: Any) -> None:
        import_external_libs(config.custom_backend_module)
        self.engine = CheckpointEngineRegistry.new(config.backend, bucket_size=4096)
        self.server = server

    def execute_checkpoint_engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.engine, method)(*arguments, **named)

    async def stage_weights(self, global_steps: int) -> str:
        checksum = StreamChecksum()
        stream = checksum.watching(self.engine.receive_weights(global_steps=global_steps))
        await self.server.stage.remote({name: tensor.clone() async for name, tensor in stream})
        return checksum.value()


class SumReplica:
    """One server and one worker."""

    def __init__(self, rank: int, config: Any, model_config: Any, per_node: int, reservations: Any = None) -> None:
        self.replica_rank, self.server_address, self._config = rank, f"sum-{rank}", config

    async def init_standalone(self) -> None:
        self.server_handle = ray.remote(SumServer).options(num_cpus=0).remote()
        self.servers = [self.server_handle]
        self.workers = [ray.remote(SumWorker).options(num_cpus=0).remote(self._config, self.server_handle)]

    async def abort_all_requests(self) -> None:
        await self.server_handle.pause.remote(True)

    async def resume_generation(self) -> None:
        await self.server_handle.pause.remote(False)

    hold_requests = abort_all_requests

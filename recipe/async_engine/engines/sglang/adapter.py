# SPDX-License-Identifier: Apache-2.0
"""Passes weights from a trainer rank or a weight worker to the SGLang server on its node.

`recipe.async_engine.engines.weight_worker` has the contract. verl's own adapter sends pickled tensors over HTTP, to an
endpoint that a rollout server of this package does not offer. This package's adapter streams buckets, as with vLLM.
"""

import os
from typing import Any

import ray
import torch
from verl.utils.device import is_support_ipc
from verl.workers.rollout.base import BaseRollout

from recipe.async_engine.engines.weight_stream import NamedTensors, socket_address
from recipe.async_engine.engines.weight_worker import DeadlineAdapter


class SGLangServerAdapter(DeadlineAdapter, BaseRollout):
    """Passes weights to an SGLang server, and fails if that takes longer than its deadline (`DeadlineAdapter`)."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank, local_size = int(os.environ["RANK"]), int(os.environ["RAY_LOCAL_WORLD_SIZE"])
        size = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        of_replica = rank % size
        self.node_rank = of_replica // local_size
        self.zmq_handle = socket_address(self.replica_rank, self.node_rank).format(rank=of_replica % local_size)
        self.use_shm = not is_support_ipc()
        self.server_handle = None
        self._has_server = of_replica == 0

    def _ensure_server_handle(self) -> bool:
        if self._has_server and self.server_handle is None:
            self.server_handle = ray.get_actor(f"sglang_server_{self.replica_rank}_{self.node_rank}")
        return self._has_server

    async def resume(self, tags: list[str]) -> None:
        if self.config.free_cache_engine and self._ensure_server_handle():
            await self.server_handle.resume_memory.remote(tags)

    async def release(self) -> None:
        if self.config.free_cache_engine and self._ensure_server_handle():
            await self.server_handle.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self, weights: NamedTensors, global_steps: int | None = None, wire_format: str = "named_tensors", **_: Any
    ) -> None:
        """Load all tensors of ``weights`` over the live weights, then commit version ``global_steps``.

        Raises:
            WeightLoadError: the engine reported an error or did not answer in time. The server refuses to answer
                until a later load is complete.
        """
        assert wire_format == "named_tensors" and global_steps is not None
        self.checksum = await self._stream(weights, global_steps, "begin_loading", "load")
        if self._has_server:
            await self._in_time(self.server_handle.commit.remote(global_steps, self.checksum), "commit")

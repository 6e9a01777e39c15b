# SPDX-License-Identifier: Apache-2.0
"""Passes weights from a trainer rank or a weight worker to the vLLM server on its node.

`recipe.async_engine.engines.weight_worker` has the contract.
"""

import asyncio
from typing import Any

import ray
import torch
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from recipe.async_engine.core.errors import WeightLoadError
from recipe.async_engine.engines.weight_stream import NamedTensors, part_id
from recipe.async_engine.engines.weight_worker import DeadlineAdapter, error_of
from recipe.async_engine.weights.checksum import StreamChecksum


def takes_adapters(model_config: Any) -> bool:
    """Return whether the trainer sends LoRA adapters instead of merged weights (verl's ``lora_as_adapter``)."""
    return max(model_config.lora_rank, model_config.lora.get("rank", 0)) > 0 and not model_config.lora.get("merge")


class DeadlineServerAdapter(DeadlineAdapter, ServerAdapter):
    """verl's adapter of a vLLM server, with deadlines."""

    node_rank: int
    _ensure_server_handle = ServerAdapter._ensure_server_handle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = self.zmq_handle.replace(ray.get_runtime_context().get_job_id(), part_id(self.node_rank))

    @torch.no_grad()
    async def update_weights(
        self, weights: NamedTensors, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Load all tensors of ``weights`` over the live weights, then commit version ``global_steps``.

        Raises:
            WeightLoadError: the engine reported an error or did not answer in time. Requests go on waiting.
        """
        if wire_format != "named_tensors":
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **kwargs)
            return
        if takes_adapters(self.model_config):
            await self._load_adapter(weights, global_steps)
            return
        if self._ensure_server_handle():
            await self._in_time(self.server_handle.begin_load.remote(global_steps), "close")
        load = await self._execute_method(
            "update_weights_from_ipc",
            non_block=True,
            timeout=self._timeout_s,
            kwargs={**kwargs, "use_shm": self.use_shm},
        )
        outcome = asyncio.create_task(error_of(load))
        checksum = StreamChecksum()
        try:
            await self._send(checksum.watching(weights), outcome)
            error = await self._in_time(outcome, "finish the load")
        finally:
            outcome.cancel()
        if error is not None:
            raise WeightLoadError(f"the rollout engine failed to load version {global_steps}: {error}")
        self.checksum = checksum.value()
        if self._has_server:
            await self._in_time(self.server_handle.clear_kv_cache.remote(), "clear its caches")
            if global_steps is not None:
                await self._in_time(self.server_handle.loaded.remote(self.checksum), "take a checksum")
                await self._in_time(self.server_handle.set_global_steps.remote(global_steps), "commit")

    async def _load_adapter(self, weights: NamedTensors, version: int | None) -> None:
        """Stage a LoRA adapter and make it live at once. The caller has paused generation."""
        assert version is not None, "each adapter has its version in its name"
        self.checksum = await self.stage_weights(weights, version)
        if self._has_server:
            await self._in_time(self.server_handle.swap.remote(version, self.checksum), "take the adapter")

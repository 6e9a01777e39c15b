# SPDX-License-Identifier: Apache-2.0
"""A sender of weights in place of a trainer, for scenarios with real receivers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from recipe.async_engine.weights.checksum import SummedSender

Stream = Callable[..., Iterator[tuple[str, torch.Tensor]]]


class Sender:
    """Trainer rank 0's end of a transfer."""

    def __init__(self, stream: Stream, settings: dict[str, Any]) -> None:
        __import__("recipe.laptop.transfer.gloo_engine")
        self._stream = stream
        self._engine = SummedSender(CheckpointEngineRegistry.new("recipe_gloo", is_master=True, **settings))

    def execute_checkpoint_engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self._engine, method)(*arguments, **named)

    async def send(self, version: int, *more: Any) -> Any:
        return await asyncio.to_thread(lambda: asyncio.run(self._send(version, *more)))

    async def _send(self, version: int, *more: Any) -> Any:
        return await self._engine.send_weights(self._stream(version, *more), global_steps=version)


class TrainerGroup:
    """A worker group of one trainer rank, which sends ``stream(version, *more)``."""

    world_size = 1

    def __init__(self, stream: Stream, **settings: Any) -> None:
        self._sender = ray.remote(Sender).remote(stream, settings)
        self.more: tuple[Any, ...] = ()

    def execute_checkpoint_engine(self, *arguments: Any, **named: Any) -> list[Any]:
        first = [argument[0] for argument in arguments]
        named = {key: value[0] for key, value in named.items()}
        return [self._sender.execute_checkpoint_engine.remote(*first, **named)]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        return [self._sender.send.remote(global_steps, *self.more)]

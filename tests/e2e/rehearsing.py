# SPDX-License-Identifier: Apache-2.0
"""Runs with one defect each in the transfer of weights, which their rehearsal has to find."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.single_controller.base.decorator import Dispatch, register

from recipe.async_engine.core.errors import WeightStreamError
from recipe.async_engine.trainer.actor_worker import ActorWorker
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.laptop.engines.engine_extension import CPUStagingExtension
from recipe.laptop.transfer.gloo_engine import GlooCheckpointEngine

SLOW_S = 20.0


class CircularWorker(ActorWorker):
    """Makes a training pass and the second weight transfer wait for each other until the group is left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_sent, self._sending, self._left = False, threading.Event(), threading.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def send_snapshot(self, version: int) -> dict[str, float]:
        if not self._has_sent:
            self._has_sent = True
            return await super().send_snapshot(version)
        self._sending.set()
        while not self._left.is_set():
            await asyncio.sleep(0.01)
        raise WeightStreamError("the group was left")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def pass_without_update(self, data: Any) -> None:
        self._sending.wait()
        self._left.wait()
        super().pass_without_update(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "reset":
            self._left.set()
        return super().execute_checkpoint_engine(method, *args, **kwargs)


class Circular(AsyncPPOTrainer):
    actor_worker = CircularWorker


class OtherWeights(CPUStagingExtension):
    """An engine that changes its norm weights when they are swapped in."""

    def swap_staged(self, version: int) -> dict[str, int]:
        counts = super().swap_staged(version)
        if is_the_first(os.environ["OTHER_WEIGHTS"]):
            with torch.no_grad():
                for name, parameter in self.model_runner.get_model().named_parameters():
                    # A CPU engine reads packed copies of linear layers, so only norms can be changed here.
                    if "layernorm" in name:
                        parameter.mul_(1.5)
        return counts


class NeverWakes(CPUStagingExtension):
    """An engine that loads no weights after it has slept."""

    loads = 0

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        NeverWakes.loads += 1
        if NeverWakes.loads > 1:
            time.sleep(3600)
        super().update_weights_from_ipc(*args, **kwargs)


def is_the_first(mark: str) -> bool:
    """Return whether this process created the mark, now or earlier."""
    try:
        Path(mark).touch(exist_ok=False)
        Path(mark).write_text(str(os.getpid()))
    except FileExistsError:
        return Path(mark).read_text() == str(os.getpid())
    return True


@CheckpointEngineRegistry.register("slow_gloo")
class SlowEngine(GlooCheckpointEngine):
    """A checkpoint engine whose receivers are slow before the second tensor of the first version."""

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        count = 0
        async for item in super().receive_weights(global_steps):
            count += 1
            if count == 2 and global_steps == 0:
                await asyncio.sleep(SLOW_S)
            yield item

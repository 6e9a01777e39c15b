# SPDX-License-Identifier: Apache-2.0
"""Checkpoint engine ``faulty_gloo``: ``recipe_gloo`` with a receiver that dies in the middle of one sync.

``FAULTY_SYNC_VERSION`` names the version, and ``FAULTY_SYNC_MARK`` a file that the dying receiver creates, so that only
one receiver dies, once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from recipe.laptop.transfer.gloo_engine import GlooCheckpointEngine


@CheckpointEngineRegistry.register("faulty_gloo")
class FaultyEngine(GlooCheckpointEngine):
    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        async for count, item in _counted(super().receive_weights(global_steps)):
            if count == 1 and global_steps == int(os.environ["FAULTY_SYNC_VERSION"]) and _first():
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


async def _counted(items: AsyncGenerator) -> AsyncGenerator:
    count = 0
    async for item in items:
        yield count, item
        count += 1


def _first() -> bool:
    try:
        Path(os.environ["FAULTY_SYNC_MARK"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

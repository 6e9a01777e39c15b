# SPDX-License-Identifier: Apache-2.0
"""Stages of a run that are lengthened by waits, which stand for the time of accelerators and use no CPU.

``GENERATION_PAD_S`` seconds are added to each answer, ``TRAINING_PAD_S`` to each update, and ``LOG_PROB_PAD_S``,
divided among a batch's trajectories, to log-probs, wherever they are computed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.async_engine.log_prob_servers.replica import ModelEngineReplica
from recipe.async_engine.log_prob_servers.worker import ModelEngineWorker
from recipe.async_engine.trainer.base import AsyncPPOTrainer


class PaddedWorker(ModelEngineWorker):
    def _score(self, rows: Sequence[np.ndarray]) -> list[tuple[np.ndarray, int]] | None:
        time.sleep(log_prob_pad(len(rows)))
        return super()._score(rows)


class PaddedReplica(ModelEngineReplica):
    worker_class = PaddedWorker


class PaddedFullyAsync(AsyncPPOTrainer):
    server_class = PaddedReplica

    def _update(self, batch: Any) -> Any:
        time.sleep(float(os.environ["TRAINING_PAD_S"]))
        return super()._update(batch)

    def by_published_weights(self, batch: Any) -> tuple[Any, float]:
        time.sleep(log_prob_pad(len(batch)))
        return super().by_published_weights(batch)


def log_prob_pad(trajectories: int) -> float:
    """Return the seconds to add for this many of a batch's trajectories."""
    return float(os.environ["LOG_PROB_PAD_S"]) * trajectories / int(os.environ["BATCH_TRAJECTORIES"])


class PaddedLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        answer = await super().run(sampling_params, **kwargs)
        await asyncio.sleep(float(os.environ["GENERATION_PAD_S"]))
        return answer

# SPDX-License-Identifier: Apache-2.0
"""Stages of a run that are lengthened by waits, which stand for the time of accelerators and use no CPU.

``GENERATION_PAD_S`` seconds are added to each answer, ``TRAINING_PAD_S`` to each update; with the fully-asynchronous
trainer also ``LOG_PROB_PAD_S``, spread over a batch's trajectories, to log-probs, whoever computes them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.debug import marked_timer

from recipe.async_engine.model_engine.launch import launch
from recipe.async_engine.model_engine.replica import ModelEngineReplica
from recipe.async_engine.model_engine.worker import ModelEngineWorker
from recipe.async_engine.settings.log_prob_servers import LogProbServers
from recipe.async_engine.trainer.base import AsyncPPOTrainer


class PaddedTrainer(AsyncPPOTrainer):
    def _fit_update_actor(self, batch: Any) -> Any:
        time.sleep(float(os.environ["TRAINING_PAD_S"]))
        return super()._fit_update_actor(batch)


class PaddedWorker(ModelEngineWorker):
    def _score(self, rows: Sequence[np.ndarray]) -> list[tuple[np.ndarray, int]] | None:
        time.sleep(log_prob_pad(len(rows)))
        return super()._score(rows)


class PaddedReplica(ModelEngineReplica):
    worker_class = PaddedWorker


class PaddedFullyAsync(AsyncPPOTrainer):
    def _fit_update_actor(self, batch: Any) -> Any:
        time.sleep(float(os.environ["TRAINING_PAD_S"]))
        return super()._fit_update_actor(batch)

    def _recompute(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with marked_timer("old_log_prob", self.timing_raw):
            time.sleep(log_prob_pad(len(batch)))
        return super()._recompute(batch)

    def _launch_servers(self, servers: LogProbServers) -> list[ModelEngineReplica]:
        return launch(self.config, servers, self.timeouts.weight_sync, PaddedReplica)


def log_prob_pad(trajectories: int) -> float:
    """Seconds for so many of a batch's trajectories."""
    return float(os.environ["LOG_PROB_PAD_S"]) * trajectories / int(os.environ["BATCH_TRAJECTORIES"])


class PaddedLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        answer = await super().run(sampling_params, **kwargs)
        await asyncio.sleep(float(os.environ["GENERATION_PAD_S"]))
        return answer

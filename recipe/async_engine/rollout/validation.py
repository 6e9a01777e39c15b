# SPDX-License-Identifier: Apache-2.0
"""Generates the answers of a validation in the same way as answers for training.

Contract: validation uses the same workers, calls, concurrency, retries, checks and deadlines as training. If all
attempts at an answer fail, its score is NaN, so that verl leaves the prompt out of its means. Answers to other prompts
are not affected. Shown by tests/integration/test_validation.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import ExitStack
from typing import Any

import torch
from ray.exceptions import RayError
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, _InternalAgentLoopOutput

from recipe.async_engine.core.columns import REPORTED
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group, PromptRef
from recipe.async_engine.rollout.group_run import GroupRun, TrajectoryFailed, TrajectoryRun
from recipe.async_engine.rollout.trajectory_codec import unpack
from recipe.async_engine.rollout.worker_pool import WorkerPool

logger = logging.getLogger(__name__)


class ValidationAnswers:
    """The answers to one batch of a validation.

    Args:
        pool: a pool of workers that is used only for this batch.
        slots: number of answers that may be generated at the same time.
        max_retries: number of attempts at an answer after the first.

    Attributes:
        errors: the last error of each answer at which all attempts failed.
    """

    def __init__(self, pool: WorkerPool, slots: int, max_retries: int) -> None:
        self.errors: list[RecipeError] = []
        self._pool, self._max_retries = pool, max_retries
        self._slots = asyncio.Semaphore(slots)

    async def of(self, prompts: DataProto, version: int) -> list[Any]:
        """Generate an answer for each row; return them as padded trajectories, with None where all attempts failed."""
        columns, runs, work = prompts.non_tensor_batch, dict[str, GroupRun](), []
        for n, uid in enumerate(map(str, columns["uid"])):
            if uid not in runs:
                group = Group(len(runs), PromptRef(len(runs), 0, uid), version)
                runs[uid] = GroupRun(group, {name: values[n : n + 1] for name, values in columns.items()}, 0)
            run = runs[uid]
            run.trajectories.append(TrajectoryRun(run, len(run.trajectories)))
            work.append(self._answer(run.trajectories[-1]))
        return await asyncio.gather(*work)

    async def _answer(self, run: TrajectoryRun) -> Any:
        while run.may_try_again(self._max_retries):
            self._pool.assign(run)
            try:
                return await self._attempt(run)
            except RecipeError as error:
                run.errors.append(error)
                logger.warning("a validation's answer failed, attempt %d: %s", len(run.errors), error)
        logger.error("all attempts at a validation's answer failed, so its prompt is left out", exc_info=run.errors[-1])
        self.errors.append(run.errors[-1])
        return None

    async def _attempt(self, run: TrajectoryRun) -> Any:
        await self._slots.acquire()
        release = ExitStack()
        release.callback(self._slots.release)
        with release:
            await self._pool.attempt(run, release.close)
        try:
            # If the agent loop returned a list, its last output is the answer, as in verl (v1/trainer_base.py:1087).
            return unpack(await run.payload)[-1]
        except RayError as error:
            raise TrajectoryFailed(f"the answer of trajectory {run.key} is lost: {error}") from error


def with_stand_ins(answers: list[Any], prompt_length: int, response_length: int) -> list[Any]:
    """Return ``answers``, with each None replaced by an empty answer whose score is NaN."""
    there = next((answer for answer in answers if answer is not None), None)
    return [_stand_in(there, prompt_length, response_length) if answer is None else answer for answer in answers]


def _stand_in(like: Any, prompt_length: int, response_length: int) -> Any:
    """Return an empty answer whose score is NaN.

    Its tensors have the same shapes as those of the answer ``like``. If ``like`` is None, their shapes follow from the
    two lengths.
    """
    if like is None:
        prompt, response, whole = (
            torch.zeros((1, length), dtype=torch.int64)
            for length in (prompt_length, response_length, prompt_length + response_length)
        )
        tensors: dict[str, Any] = {
            **dict.fromkeys(["response_ids", "response_mask"], response),
            **dict.fromkeys(["input_ids", "attention_mask", "position_ids"], whole),
            "prompt_ids": prompt,
        }
    else:
        tensors = {name: torch.zeros_like(value) for name, value in vars(like).items() if torch.is_tensor(value)}
    return _InternalAgentLoopOutput(
        **tensors, reward_score=math.nan, metrics=AgentLoopMetrics(), extra_fields={REPORTED: None}
    )

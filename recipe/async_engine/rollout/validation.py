# SPDX-License-Identifier: Apache-2.0
"""A validation's answers, by the way that training's go.

Contract: the same workers run them, by the same calls, as many at once, with the same retries, checks and deadlines.
An answer that fails for good costs its prompt: it has no score (NaN), so that verl's means leave the prompt out, and
the others are as they would be without it. Shown by tests/integration/test_validation.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from typing import Any, cast

import numpy as np
import torch
from ray.exceptions import RayError
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, _InternalAgentLoopOutput

from recipe.async_engine.core.columns import REPORTED
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.groups import Group
from recipe.async_engine.core.prompts import PromptRef
from recipe.async_engine.rollout.group_run import may_try_again, needs_to_be_alone
from recipe.async_engine.rollout.trajectory_codec import unpack
from recipe.async_engine.rollout.trajectory_events import TrajectoryFailed, TrajectoryGenerated
from recipe.async_engine.rollout.worker_pool import TrajectoryCall, WorkerPool

logger = logging.getLogger(__name__)


class ValidationAnswers:
    """The answers to one batch of a validation.

    Args:
        pool: of the workers; made for this batch.
        slots: answers that may be generated at once.
        max_retries: attempts of an answer beyond the first.

    Attributes:
        errors: what answers failed with for good.
    """

    def __init__(self, pool: WorkerPool, slots: int, max_retries: int) -> None:
        self.errors: list[RecipeError] = []
        self._pool, self._max_retries = pool, max_retries
        self._slots = asyncio.Semaphore(slots)

    async def of(self, prompts: DataProto, version: int) -> list[Any]:
        """verl's padded trajectory for each row, None for one that failed for good."""
        columns, answered, work = prompts.non_tensor_batch, Counter[str](), []
        groups: dict[str, Group] = {}
        for n, uid in enumerate(map(str, columns["uid"])):
            group = groups.setdefault(uid, Group(len(groups), PromptRef(len(groups), 0, uid), version))
            row = {name: values[n : n + 1] for name, values in columns.items()}
            work.append(self._answer(row, group, answered[uid]))
            answered[uid] += 1
        return await asyncio.gather(*work)

    async def _answer(self, row: dict[str, np.ndarray], group: Group, number: int) -> Any:
        errors: list[RecipeError] = []
        avoid = None
        while may_try_again(errors, self._max_retries):
            call = self._pool.call(row, group, number, len(errors), avoid, alone=needs_to_be_alone(errors))
            try:
                return await self._attempt(call)
            except RecipeError as error:
                logger.warning("a validation's answer failed, attempt %d: %s", len(errors) + 1, error)
                errors.append(error)
                avoid = call.worker_id
        logger.error("an answer of the validation is left out, with its prompt", exc_info=errors[-1])
        self.errors.append(errors[-1])
        return None

    async def _attempt(self, call: TrajectoryCall) -> Any:
        await self._slots.acquire()
        generates, payload = True, cast(Any, None)
        try:
            async for event, last in call.events():
                payload = last
                if isinstance(event, TrajectoryGenerated):
                    generates = False
                    self._slots.release()
            return unpack(await payload)
        except RayError as error:
            raise TrajectoryFailed(f"the answer of trajectory {call.key} is lost: {error}") from error
        finally:
            if generates:
                self._slots.release()


def with_stand_ins(answers: list[Any], prompt_length: int, response_length: int) -> list[Any]:
    """The answers, with an empty one that has no score in the place of each that failed."""
    there = next((answer for answer in answers if answer is not None), None)
    return [_stand_in(there, prompt_length, response_length) if answer is None else answer for answer in answers]


def _stand_in(like: Any, prompt_length: int, response_length: int) -> Any:
    """An empty answer without a score, of the shapes of another one if there is any."""
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

# SPDX-License-Identifier: Apache-2.0
"""Which reward worker scores an answer: the one with the fewest calls of this process. verl takes one at random.

Contract: what a call raises, its caller gets; a further attempt goes to another worker than one that died or does not
answer, if there is another (`actors/worker_set.py`), and one whose calls fail is not preferred for being idle. A
worker is asked whether it answers when a call of it was given up. Where none can be asked a call waits for one; the
caller has the deadline. A DataProto travels as arrays. Shown by tests/integration/test_reward_dispatch.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from recipe.async_engine.actors.worker_set import WorkerDied, WorkerSet, as_handle
from recipe.async_engine.core.errors import RecipeError

ANSWER_S = 30.0
"""How long a worker may take to say that it is there; half as much again at most, by chance, so that of several that
ask it only one ends it."""

ARRAY_TYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    }
)


class NoRewardWorker(RecipeError):
    """Every reward worker has died, and none is started again."""


class InTransit:
    """A DataProto that is pickled as its arrays, and is a DataProto again where it is unpickled.

    verl's own way, a consolidated TensorDict through ``torch.save``, costs several times the rest of a reward call. It
    is left to what arrays cannot say: a subclass, no tensors at all, nested or sparse tensors, bfloat16.
    """

    def __init__(self, data: DataProto) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        data = self.data
        if type(data) is not DataProto or data.batch is None or not all(map(_is_array, data.batch.values())):
            return _as_it_is, (data,)
        arrays = {name: value.numpy(force=True) for name, value in data.batch.items()}
        return _arrived, (arrays, len(data), data.non_tensor_batch, data.meta_info)


def _is_array(value: Any) -> bool:
    """Whether numpy has a value like this one."""
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested
    return plain and value.dtype in ARRAY_TYPES


def _as_it_is(data: Any) -> Any:
    return data


def _arrived(arrays: dict[str, np.ndarray], rows: int, non_tensors: dict[str, Any], meta: dict[str, Any]) -> DataProto:
    # Copies: what Ray hands over may not be written to, and a reward manager may do so.
    tensors = {name: torch.tensor(value) for name, value in arrays.items()}
    return DataProto(batch=TensorDict(tensors, batch_size=rows), non_tensor_batch=non_tensors, meta_info=meta)


def least_busy_worker(actors: Sequence[Any]) -> Any:
    """Stands in for a handle of verl's reward workers; see the module's contract. Used on one event loop."""
    workers = WorkerSet("reward", actors, ANSWER_S * random.uniform(1.0, 1.5))
    last: list[WorkerDied] = []

    async def score(data: Any) -> dict[str, Any]:
        """verl's ``RewardLoopWorker.compute_score``; raises NoRewardWorker, or WorkerDied if the worker did."""
        while (name := workers.choose()) in workers.silent:
            await workers.news()
        try:
            if name is not None:
                async with workers.one(name) as worker:
                    answer = await worker.compute_score.remote(InTransit(data))
                workers.note(name, failed=False)
                return answer
        except WorkerDied as error:
            last[:] = [error]
            # It may have been waited for in vain, and have been the last one.
            if not workers.lost:
                raise
        except Exception:
            if name is not None:
                workers.note(name, failed=True)
            raise
        except asyncio.CancelledError:
            # Past its deadline, usually.
            workers.doubt(name)
            raise
        raise NoRewardWorker(
            f"every reward worker has died; the last one: {last[0] if last else 'before its first call'}"
        )

    return as_handle("compute_score", score)

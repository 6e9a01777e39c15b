# SPDX-License-Identifier: Apache-2.0
"""Which reward worker scores an answer: the one with the fewest calls of this process. verl takes one at random.

Contract: what a call raises, its caller gets; a further attempt goes to another worker than one that died or does not
answer, if there is another (`recovery/worker_set.py`). A worker is asked whether it answers when a call of it was given
up. Where none can be asked a call waits for one; the caller has the deadline. Shown by
tests/integration/test_reward_dispatch.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.recovery.worker_set import WorkerDied, WorkerSet, as_handle

ANSWER_S = 30.0
"""How long a worker may take to say that it is there; half as much again at most, by chance, so that of several that
ask it only one ends it."""


class NoRewardWorker(RecipeError):
    """Every reward worker has died, and none is started again."""


def least_busy_worker(actors: Sequence[Any]) -> Any:
    """Stands in for a handle of verl's reward workers; see the module's contract. Used on one event loop."""
    workers = WorkerSet("reward", actors, ANSWER_S * random.uniform(1.0, 1.5))

    async def score(data: Any) -> dict[str, Any]:
        """verl's ``RewardLoopWorker.compute_score``; raises NoRewardWorker, or WorkerDied if the worker did."""
        while (name := workers.choose()) in workers.silent:
            await workers.news()
        try:
            if name is not None:
                async with workers.one(name) as worker:
                    return await worker.compute_score.remote(data)
        except WorkerDied:
            # It may have been waited for in vain, and have been the last one.
            if not workers.lost:
                raise
        except asyncio.CancelledError:
            # Past its deadline, usually.
            workers.doubt(name)
            raise
        raise NoRewardWorker("every reward worker has died; the first one's error is in the log above")

    return as_handle("compute_score", score)

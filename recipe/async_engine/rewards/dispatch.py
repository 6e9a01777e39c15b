# SPDX-License-Identifier: Apache-2.0
"""Which reward worker scores an answer: the one with the fewest calls of this process. verl takes one at random.

Contract: a call goes to the least busy worker that is alive; what a call raises, its caller gets. A worker that died is
asked no more, so a further attempt goes to another one, until Ray has started it again (`rewards/workers.py`). A worker
whose call was given up is asked no more until it answers again; one that has not within `ANSWER_S` (it was stopped, or
its event loop hangs) is ended, and so started again. Where none can be asked a call waits for one; the caller has the
deadline. Shown by tests/integration/test_reward_dispatch.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.spread import TokenSpread
from recipe.async_engine.run.restarts import is_up_again

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long a worker may take to say that it is there; half as much again at most, by chance, so that of several that
ask it only one ends it."""


class NoRewardWorker(RecipeError):
    """Every reward worker has died, and none is started again."""


class LeastBusyWorker:
    """Stands in for a handle of verl's reward workers; see the module's contract. Used on one event loop."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = {f"reward worker {number}": worker for number, worker in enumerate(workers)}
        self._calls = TokenSpread(self._workers)
        self._returning: dict[str, asyncio.Task[None]] = {}

    @property
    def compute_score(self) -> LeastBusyWorker:
        """As of an actor handle: its ``remote`` begins a call."""
        return self

    def remote(self, data: Any) -> Awaitable[dict[str, Any]]:
        """verl's ``RewardLoopWorker.compute_score``.

        Raises:
            NoRewardWorker: none is alive or being started.
        """
        return self._score(data)

    async def _score(self, data: Any) -> dict[str, Any]:
        name = await self._choose()
        self._calls.begin(name, 1)
        try:
            return await self._workers[name].compute_score.remote(data)
        except asyncio.CancelledError:
            # Past its deadline, usually: whether it is this call alone or the worker, only asking can tell.
            self._set_aside(name, self._ask(name))
            raise
        except RayActorError as error:
            if name in self._calls:
                logger.error("%s died: %s", name, error)
                self._calls.remove(name)
                self._set_aside(name, self._wait_for(name))
            raise
        finally:
            self._calls.end(name, 1)

    async def _choose(self) -> str:
        while (name := self._calls.choose(but=self._returning)) is None:
            if not self._returning:
                raise NoRewardWorker("every reward worker has died; the first one's error is in the log above")
            await asyncio.wait(self._returning.values(), return_when=asyncio.FIRST_COMPLETED)
        return name

    def _set_aside(self, name: str, until: Coroutine[Any, Any, None]) -> None:
        """Have a worker asked no more until this is done; unless it is set aside already."""
        if name in self._returning:
            until.close()
            return
        task = self._returning[name] = asyncio.create_task(until)
        task.add_done_callback(lambda _: self._returning.pop(name))

    async def _ask(self, name: str) -> None:
        """Ask a worker whether it is there; end it if it does not answer."""
        worker = self._workers[name]
        try:
            await asyncio.wait_for(worker.__ray_ready__.remote(), ANSWER_S * random.uniform(1.0, 1.5))
        except TimeoutError:
            logger.error("%s does not answer within %g s: it is ended, to be started again", name, ANSWER_S)
            ray.kill(worker, no_restart=False)
        except RayActorError as error:
            logger.error("%s died: %s", name, error)
        else:
            return
        self._calls.remove(name)
        await self._wait_for(name)

    async def _wait_for(self, name: str) -> None:
        """Until it answers again, or Ray says that it is not started any more."""
        if await is_up_again(self._workers[name]):
            logger.warning("%s is up again", name)
            self._calls.add(name)
        else:
            logger.error("%s is not started again", name)

# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Which reward worker scores an answer: the one with the fewest calls of this process. verl takes one at random.

Contract: a call goes to the least busy worker that is alive; what a call raises, its caller gets. A worker that died is
asked no more, so a further attempt goes to another one, until Ray has started it again (`rewards/workers.py`). Where
none is alive a call waits for one that is being started; the caller has the deadline. Shown by
tests/integration/test_reward_dispatch.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any

from ray.exceptions import RayActorError

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.spread import TokenSpread
from recipe.async_engine.run.restarts import is_up_again

logger = logging.getLogger(__name__)


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
        except RayActorError as error:
            if name in self._calls:
                logger.error("%s died: %s", name, error)
                self._calls.remove(name)
                self._returning[name] = asyncio.create_task(self._wait_for(name))
            raise
        finally:
            self._calls.end(name, 1)

    async def _choose(self) -> str:
        while (name := self._calls.choose()) is None:
            if not self._returning:
                raise NoRewardWorker("every reward worker has died; the first one's error is in the log above")
            await asyncio.wait(self._returning.values(), return_when=asyncio.FIRST_COMPLETED)
        return name

    async def _wait_for(self, name: str) -> None:
        """Until it answers again, or Ray says that it is not started any more."""
        try:
            if await is_up_again(self._workers[name]):
                logger.warning("%s is up again", name)
                self._calls.add(name)
            else:
                logger.error("%s is not started again", name)
        finally:
            del self._returning[name]

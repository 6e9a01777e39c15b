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
asked no more, so a further attempt goes to another one. Shown by tests/integration/test_reward_dispatch.py.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import Any

from ray.exceptions import RayActorError

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.spread import TokenSpread

logger = logging.getLogger(__name__)


class NoRewardWorker(RecipeError):
    """Every reward worker has died."""


class LeastBusyWorker:
    """Stands in for a handle of verl's reward workers; see the module's contract."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = {f"reward worker {number}": worker for number, worker in enumerate(workers)}
        self._calls = TokenSpread(self._workers)

    @property
    def compute_score(self) -> LeastBusyWorker:
        """As of an actor handle: its ``remote`` begins a call."""
        return self

    def remote(self, data: Any) -> Awaitable[dict[str, Any]]:
        """verl's ``RewardLoopWorker.compute_score``.

        Raises:
            NoRewardWorker: none is alive.
        """
        return self._score(data)

    async def _score(self, data: Any) -> dict[str, Any]:
        name = self._calls.choose()
        if name is None:
            raise NoRewardWorker("every reward worker has died; the first one's error is in the log above")
        self._calls.begin(name, 1)
        try:
            return await self._workers[name].compute_score.remote(data)
        except RayActorError as error:
            logger.error("%s died: %s", name, error)
            self._calls.remove(name)
            raise
        finally:
            self._calls.end(name, 1)

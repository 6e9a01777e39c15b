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
"""The agent-loop workers of generation in turns.

Contract: as :class:`WorkerPool`; besides, a turn is over for every live worker when :meth:`TurnPool.end_turn` returns.
A worker that does not answer in time is left to the deadlines of its trajectories.
"""

import asyncio
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.core.groups import Group
from recipe.async_engine.rollout.workers import TrajectoryCall, WorkerPool
from recipe.partial_rollout.turns import TokenAccount

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TurnCall(TrajectoryCall):
    """One attempt at one trajectory, admitted to ``turn``, going on from ``record`` if there is one."""

    turn: int = 0
    record: bytes | None = None

    def arguments(self) -> tuple[Any, ...]:
        return *super().arguments(), self.turn, self.record


class TurnPool(WorkerPool):
    """The live workers; see the module's contract."""

    def call_in(
        self,
        turn: int,
        row: dict[str, Any],
        group: Group,
        rollout_n: int,
        attempt: int,
        avoid: str | None,
        record: bytes | None,
    ) -> TurnCall:
        """As :meth:`WorkerPool.call`, admitted to ``turn``."""
        call = self.call(row, group, rollout_n, attempt, avoid)
        plain = {item.name: getattr(call, item.name) for item in dataclasses.fields(call)}
        return TurnCall(**plain, turn=turn, record=record)

    def resume(self, calls: Iterable[TurnCall], turn: int) -> None:
        """Let these calls go on in ``turn``, in this order."""
        by_worker: dict[str, list[str]] = defaultdict(list)
        for call in calls:
            by_worker[call.worker_id].append(call.key)
        for worker_id, keys in by_worker.items():
            # Of a worker that died, the calls end with its death.
            if worker_id in self._actors:
                self._actors[worker_id].resume.remote(keys, turn)

    async def end_turn(self, turn: int, timeout_s: float) -> TokenAccount:
        """Hold every trajectory at its next request; returns the workers' account together."""
        return sum(await self._ask("end_turn", timeout_s, turn), TokenAccount())

    async def export(self, timeout_s: float) -> tuple[dict[str, bytes | None], TokenAccount]:
        """What every unfinished trajectory keeps, by its call's key, and the workers' account together."""
        kept: dict[str, bytes | None] = {}
        account = TokenAccount()
        for part, tokens in await self._ask("export", timeout_s, timeout_s):
            kept.update(part)
            account += tokens
        return kept, account

    async def _ask(self, method: str, timeout_s: float, *arguments: Any) -> list[Any]:
        """What the workers answer; one that does not is logged and left out."""

        async def answer(worker_id: str, actor: Any) -> Any:
            try:
                return await asyncio.wait_for(getattr(actor, method).remote(*arguments), timeout_s)
            except Exception as error:  # its trajectories end with their own errors
                logger.error("agent-loop %s did not answer %s: %s", worker_id, method, error)
                return None

        answers = await asyncio.gather(*[answer(worker_id, actor) for worker_id, actor in self._actors.items()])
        return [part for part in answers if part is not None]

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

Contract: as :class:`WorkerPool`; besides, a turn is over for every live worker when :meth:`TurnPool.end_turn` returns,
and for one that was started again before it has work. A worker that does not answer in time is left to the deadlines of
its trajectories. Of one that died, the account is that of its last turn, and what it held is lost.
"""

import asyncio
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.core.groups import Group
from recipe.async_engine.rollout.agent_worker import WorkerRestarted
from recipe.async_engine.rollout.workers import TrajectoryCall, WorkerPool
from recipe.partial_rollout.turns import TokenAccount

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TurnCall(TrajectoryCall):
    """One attempt at one trajectory, admitted to ``turn``, going on from ``record`` if there is one."""

    turn: int = 0
    record: bytes | None = None

    def arguments(self) -> tuple[Any, ...]:
        return *super().arguments(), self.pool.admitted.get(self.key, self.turn), self.record


class TurnPool(WorkerPool):
    """The agent-loop workers; see the module's contract.

    Attributes:
        admitted: the newest turn of each call that goes on in a later one than it was made for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.admitted: dict[str, int] = {}
        self._closed = 0
        self._accounts: dict[str, TokenAccount] = {}
        self._of_the_dead = TokenAccount()

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
            # For one that waits for its worker to be started again.
            self.admitted[call.key] = turn
            by_worker[call.worker_id].append(call.key)
        for worker_id, keys in by_worker.items():
            if worker_id in self._actors:
                self._actors[worker_id].resume.remote(keys, turn)

    async def end_turn(self, turn: int, timeout_s: float) -> TokenAccount:
        """Hold every trajectory at its next request; returns the workers' account together."""
        self._closed = turn
        for worker_id, account in (await self._ask("end_turn", timeout_s, turn)).items():
            self._note(worker_id, account)
        return self._account()

    async def export(self, timeout_s: float) -> tuple[dict[str, bytes | None], TokenAccount]:
        """What every unfinished trajectory keeps, by its call's key, and the workers' account together."""
        kept: dict[str, bytes | None] = {}
        for worker_id, (part, tokens) in (await self._ask("export", timeout_s, timeout_s)).items():
            kept.update(part)
            self._note(worker_id, tokens)
        return kept, self._account()

    def ended(self, call: TrajectoryCall) -> None:
        """As :meth:`WorkerPool.ended`."""
        super().ended(call)
        self.admitted.pop(call.key, None)

    def died(self, worker_id: str, life: int, error: BaseException) -> None:
        """As :meth:`WorkerPool.died`."""
        super().died(worker_id, life, error)
        if worker_id not in self._actors and not isinstance(error, WorkerRestarted):
            self._of_the_dead += self._accounts.pop(worker_id, TokenAccount()).of_the_dead()

    def _note(self, worker_id: str, account: TokenAccount) -> None:
        # One that has died since is counted already.
        if worker_id not in self._actors:
            return
        before = self._accounts.get(worker_id, TokenAccount())
        if account.cut < before.cut:
            # Of another process: that one died with no work, so that nobody has noticed yet.
            self._of_the_dead += before.of_the_dead()
        self._accounts[worker_id] = account

    def _account(self) -> TokenAccount:
        return sum(self._accounts.values(), self._of_the_dead)

    async def _prepare(self, actor: Any) -> None:
        await super()._prepare(actor)
        told = 0
        while told < self._closed:
            told = self._closed
            await actor.end_turn.remote(told)

    async def _ask(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any]:
        """What the workers answer, by worker; one that does not is logged and left out."""

        async def answer(worker_id: str, actor: Any) -> Any:
            try:
                return await asyncio.wait_for(getattr(actor, method).remote(*arguments), timeout_s)
            except Exception as error:  # its trajectories end with their own errors
                logger.error("agent-loop %s did not answer %s: %s", worker_id, method, error)
                return None

        asked = dict(self._actors)
        answers = await asyncio.gather(*[answer(worker_id, actor) for worker_id, actor in asked.items()])
        return {worker_id: part for worker_id, part in zip(asked, answers, strict=True) if part is not None}

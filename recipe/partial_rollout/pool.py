# SPDX-License-Identifier: Apache-2.0
"""The agent-loop workers of generation in turns.

Contract: as :class:`WorkerPool`; besides, a turn is over for every live worker when :meth:`TurnPool.end_turn` returns,
and for one that was started again before it has work. A worker that does not answer in time is left to the deadlines of
its trajectories.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.workers import TrajectoryCall, WorkerPool


@dataclass(frozen=True)
class TurnCall(TrajectoryCall):
    """One attempt at one trajectory, admitted to ``turn``."""

    turn: int = 0

    def arguments(self) -> tuple[Any, ...]:
        return *super().arguments(), self.pool.admitted.get(self.key, self.turn)


class TurnPool(WorkerPool):
    """The agent-loop workers; see the module's contract.

    Attributes:
        admitted: the newest turn of each call that goes on in a later one than it was made for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.admitted: dict[str, int] = {}
        self._closed = 0

    def call_in(self, turn: int, *arguments: Any) -> TurnCall:
        """As :meth:`WorkerPool.call`, admitted to ``turn``."""
        call = self.call(*arguments)
        plain = {item.name: getattr(call, item.name) for item in dataclasses.fields(call)}
        return TurnCall(**plain, turn=turn)

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

    def ended(self, call: TrajectoryCall) -> None:
        """As :meth:`WorkerPool.ended`."""
        super().ended(call)
        self.admitted.pop(call.key, None)

    async def _prepare(self, actor: Any) -> None:
        await super()._prepare(actor)
        told = 0
        while told < self._closed:
            told = self._closed
            await actor.end_turn.remote(told)

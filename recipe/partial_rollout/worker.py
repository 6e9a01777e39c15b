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
"""Agent-loop workers and their client for generation in turns.

Contract: agent loops are verl's or the user's, unchanged; a loop notices nothing of an interruption. What decides when
a trajectory may generate, and what is kept of it, is :mod:`recipe.partial_rollout.turns`; this puts it around every
request. Validation has no ticket, so it passes while training's trajectories wait.

Shown by tests/integration/test_turns.py and tests/e2e/test_partial_rollout.py.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.rollout.agent_worker import TrajectoryWorker
from recipe.async_engine.rollout.agents import TrajectoryManager
from recipe.async_engine.rollout.client import ResumingClient
from recipe.partial_rollout.turns import TokenAccount, TurnGate, current_ticket, use_ticket

TICKET = "recipe_turn_ticket"


class TurnClient(ResumingClient):
    """The resuming client, whose requests wait for their trajectory's turn and are answered from its record."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        timeouts = self.config.async_training.timeouts
        between_turns = (timeouts.batch_wait, timeouts.weight_sync, timeouts.checkpoint, timeouts.validation)
        self._held_timeout_s = float(sum(between_turns))

    async def _request(self, request_id: str, **kwargs: Any) -> TokenOutput | None:
        ticket = current_ticket()
        if ticket is None:
            return await super()._request(request_id, **kwargs)
        asked = kwargs["prompt_ids"]
        kept = ticket.again(asked)
        if kept is not None:
            return kept
        await ticket.enter(self._held_timeout_s)
        with ticket.request():
            answer = await super()._request(request_id, **kwargs)
            if answer is not None:
                ticket.keep(asked, answer)
            return answer

    def _interrupted(self) -> None:
        # The servers stop before this worker is told, so that a busy worker does not keep them.
        ticket = current_ticket()
        if ticket is not None:
            ticket.leave()


class TurnWorker(TrajectoryWorker):
    """The trajectory worker, with a ticket for each of its trajectories."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gate = TurnGate()

    async def run_trajectory(
        self,
        key: str,
        sample: dict[str, Any],
        sample_index: int,
        rollout_n: int,
        version: int,
        turn: int,
        record: bytes | None = None,
    ) -> AsyncGenerator[Any, None]:
        """As :meth:`TrajectoryWorker.run_trajectory`, in generation turns.

        Args:
            turn: the turn that the trajectory is admitted to; later ones by :meth:`resume`.
            record: what :meth:`export` gave for this trajectory in an earlier process.
        """
        ticket = self._gate.begin(key, turn, record)
        events = super().run_trajectory(key, {**sample, TICKET: ticket}, sample_index, rollout_n, version)
        complete = False
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
            complete = True
        finally:
            self._gate.end(key, complete)

    async def _trajectory(self, generated: asyncio.Event, sample: dict[str, Any], *args: Any) -> Any:
        ticket = sample.pop(TICKET)
        ticket.sampled = generated
        use_ticket(ticket)
        return await super()._trajectory(generated, sample, *args)

    async def end_turn(self, turn: int) -> TokenAccount:
        """Hold every trajectory at its next request from now on; returns the account of this moment."""
        self._gate.close(turn)
        return self._gate.account_now()

    async def resume(self, keys: list[str], turn: int) -> None:
        """Let these trajectories go on in ``turn``."""
        self._gate.admit(keys, turn)

    async def export(self, timeout_s: float) -> tuple[dict[str, bytes | None], TokenAccount]:
        """What each unfinished trajectory keeps, and the account of this moment; call it between turns."""
        return await self._gate.export(timeout_s), self._gate.account_now()


class TurnManager(TrajectoryManager):
    """verl's manager over :class:`TurnWorker` s."""

    worker_class = TurnWorker

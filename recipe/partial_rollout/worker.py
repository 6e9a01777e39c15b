# SPDX-License-Identifier: Apache-2.0
"""Agent-loop workers and their client for generation in turns.

Contract: agent loops are verl's or the user's, unchanged; a loop notices nothing of an interruption. What decides when
a trajectory may generate is :mod:`recipe.partial_rollout.turns`; this puts it before every request that a server has to
answer. Validation has no ticket, so it passes while training's trajectories wait.

Shown by tests/integration/test_turns.py and tests/e2e/test_partial_rollout.py.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from recipe.async_engine.rollout.agent_worker import TrajectoryWorker
from recipe.async_engine.rollout.agents import TrajectoryManager
from recipe.async_engine.rollout.client import ResumingClient
from recipe.async_engine.rollout.kept_answers import TokenAccount, TrajectoryAnswers, TrajectoryRecord
from recipe.partial_rollout.turns import TurnGate, current_ticket, use_ticket

TICKET = "recipe_turn_ticket"


class TurnClient(ResumingClient):
    """The resuming client, whose requests wait for their trajectory's turn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        timeouts = self.config.async_training.timeouts
        between_turns = (timeouts.batch_wait, timeouts.weight_sync, timeouts.checkpoint, timeouts.validation)
        self._held_timeout_s = float(sum(between_turns))

    async def _admission(self) -> None:
        ticket = current_ticket()
        if ticket is not None:
            await ticket.enter(self._held_timeout_s)

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
        record: TrajectoryRecord | None = None,
        turn: int = 0,
    ) -> AsyncGenerator[Any, None]:
        """As :meth:`TrajectoryWorker.run_trajectory`, admitted to ``turn``; to later ones by :meth:`resume`."""
        ticket = self._gate.begin(key, turn)
        events = super().run_trajectory(key, {**sample, TICKET: ticket}, sample_index, rollout_n, version, record)
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._gate.end(key)

    async def _trajectory(
        self, generated: asyncio.Event, answers: TrajectoryAnswers, sample: dict[str, Any], *args: Any
    ) -> Any:
        ticket = sample.pop(TICKET)
        ticket.sampled, ticket.answers = generated, answers
        use_ticket(ticket)
        return await super()._trajectory(generated, answers, sample, *args)

    def _held_s(self, key: str) -> float:
        return self._gate.held_s(key)

    async def end_turn(self, turn: int) -> TokenAccount:
        """Hold every trajectory at its next request from now on; returns the account of this moment."""
        self._answers.interrupted_in_tools(self._gate.close(turn))
        return self._answers.account()

    async def resume(self, keys: list[str], turn: int) -> None:
        """Let these trajectories go on in ``turn``."""
        self._gate.admit(keys, turn)


class TurnManager(TrajectoryManager):
    """verl's manager over :class:`TurnWorker` s."""

    worker_class = TurnWorker

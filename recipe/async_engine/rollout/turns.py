# SPDX-License-Identifier: Apache-2.0
"""Which trajectories of an agent-loop worker may generate, where generation happens in turns.

Contract. A :class:`Ticket` admits a trajectory to one generation turn. Its requests wait (on an event, without
polling) while its turn is closed, whatever the agent loop does meanwhile, so a loop in a tool call waits at its next
request and notices nothing of an interruption. Where generation is a stream no trajectory has a ticket, nor has
validation, which passes while training's trajectories wait.

No Ray, no engine: one event loop calls it. Shown by tests/integration/test_turns.py.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from recipe.async_engine.actors.control import Early
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.rollout.kept_answers import TrajectoryAnswers


class HeldTooLong(RecipeError):
    """A trajectory waited longer for its next generation turn than a turn of the trainer may take."""


@dataclass
class Ticket:
    """One trajectory's admission; see the module's contract.

    Attributes:
        turn: the newest turn that the trajectory is admitted to.
        left: the newest turn in which a server gave a request of it back: that turn is over for it.
        admitted: wakes what waits for a turn.
        sampled: done with the trajectory's last token.
        answers: of the trajectory, with its requests under way.
        waiting: requests that wait for a turn.
        held: seconds in which some did, before the present wait, which began at ``held_since``.
    """

    gate: "TurnGate"
    turn: int
    left: int = 0
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    sampled: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    answers: TrajectoryAnswers = field(default_factory=TrajectoryAnswers)
    waiting: int = 0
    held: float = 0.0
    held_since: float = 0.0

    @property
    def held_s(self) -> float:
        """Seconds in which it waited for a turn."""
        return self.held + (time.monotonic() - self.held_since if self.waiting else 0.0)

    async def enter(self) -> None:
        """Wait until the trajectory is admitted to an open turn.

        Raises:
            HeldTooLong: after the gate's ``timeout_s``.
        """
        if not self.waiting:
            self.held_since = time.monotonic()
        self.waiting += 1
        try:
            async with asyncio.timeout(self.gate.timeout_s):
                while self.turn <= max(self.left, self.gate.closed):
                    self.admitted.clear()
                    await self.admitted.wait()
        except TimeoutError:
            raise HeldTooLong(
                f"an interrupted trajectory waited {self.gate.timeout_s:g} s for its next generation turn; training, a "
                "weight sync, a checkpoint and a validation together should take less (async_training.timeouts)"
            ) from None
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.held += time.monotonic() - self.held_since

    def leave(self) -> None:
        """A server gave a request back: wait for the next turn."""
        self.left = self.turn


class TurnGate:
    """The tickets of one worker's unfinished trajectories.

    Attributes:
        timeout_s: how long a trajectory may wait for its next turn.
        closed: the newest turn that is over.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.closed = 0
        self._tickets: dict[str, Ticket] = {}
        self._early = Early()

    def begin(self, key: str, turn: int) -> Ticket:
        """A trajectory begins, admitted to ``turn``."""
        ticket = self._tickets[key] = Ticket(self, max(turn, self._early.take(key) or 0))
        return ticket

    def held_s(self, key: str) -> float:
        """Seconds in which a trajectory waited for its turns, which count for no deadline."""
        return self._tickets[key].held_s if key in self._tickets else 0.0

    def end(self, key: str) -> None:
        """The trajectory is over, whether it had a ticket or not."""
        self._tickets.pop(key, None)

    def close(self, turn: int) -> int:
        """The turn is over: from now on requests wait.

        Returns how many trajectories this interrupts while none of their requests is under way.
        """
        self.closed = max(self.closed, turn)
        return sum(
            ticket.turn == turn and not (ticket.sampled.done() or ticket.answers.flights or ticket.waiting)
            for ticket in self._tickets.values()
        )

    def admit(self, keys: Sequence[str], turn: int) -> None:
        """Let these trajectories go on in ``turn``, in this order, also one that has not begun yet."""
        for key in keys:
            ticket = self._tickets.get(key)
            if ticket is None:
                self._early.say(key, turn)
            else:
                ticket.turn = turn
                ticket.admitted.set()

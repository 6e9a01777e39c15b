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
"""Which trajectories of an agent-loop worker may generate, and what each one has been answered so far.

Contract. A :class:`Ticket` admits a trajectory to one generation turn. Its requests wait (on an event, without
polling) while its turn is closed, whatever the agent loop does meanwhile, so a loop in a tool call waits at its next
request. Every answer, whole or cut, is kept with a digest of the tokens it answered; :meth:`TurnGate.export` gives
what is kept, once no request is under way. A trajectory that is begun with such a record runs its agent loop from the
start, and its requests are answered from the record where they ask for the same: no kept token is generated again.
Where a tool answers differently the second time, what the record has beyond it is unused, and counted as lost.

No Ray, no engine: one event loop calls it. Shown by tests/integration/test_turns.py.
"""

import asyncio
import hashlib
import pickle
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from recipe.async_engine.core.errors import RecipeError

# verl's words for an answer that an engine gave back unfinished.
ABORTED = ("aborted", "abort")


class HeldTooLong(RecipeError):
    """A trajectory waited longer for its next generation turn than a turn of the trainer may take."""


@dataclass(frozen=True)
class KeptAnswer:
    """One answer of a server, perhaps cut, and the digest of the tokens that it answered."""

    asked: bytes
    answer: Any

    @property
    def cut_tokens(self) -> int:
        """Its tokens if it was cut."""
        return len(self.answer.token_ids) if self.answer.stop_reason in ABORTED else 0


@dataclass
class TokenAccount:
    """What became of the tokens of cut answers, since a worker began.

    cut: sampled before an interruption. restored: given again from the record of an earlier process, complete answers
    included. lost: of trajectories that failed or were given up, or that a tool answered differently after a restart.
    in_tools: trajectories that were interrupted while none of their requests was under way. held: tokens of cut answers
    that unfinished trajectories have at this moment.
    """

    cut: int = 0
    restored: int = 0
    lost: int = 0
    in_tools: int = 0
    held: int = 0

    def __add__(self, other: "TokenAccount") -> "TokenAccount":
        parts = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return TokenAccount(**parts)

    def of_the_dead(self) -> "TokenAccount":
        """The same once the worker has died: what was held is lost."""
        return replace(self, lost=self.lost + self.held, held=0)


def cut_tokens(record: bytes) -> int:
    """Tokens of cut answers in what :meth:`TurnGate.export` gave for a trajectory."""
    return sum(kept.cut_tokens for kept in pickle.loads(record))


def digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass
class Ticket:
    """One trajectory's admission and its record; see the module's contract.

    Attributes:
        turn: the newest turn that the trajectory is admitted to.
        left: the newest turn in which a server gave a request of it back: that turn is over for it.
        kept: its answers so far, in order.
        replay: answers of an earlier process that are to be given again.
        admitted: wakes what waits for a turn.
        sampled: set with the trajectory's last token.
        requests: those under way at a server. waiting: those that wait for a turn.
    """

    gate: "TurnGate"
    turn: int
    left: int = 0
    kept: list[KeptAnswer] = field(default_factory=list)
    replay: list[KeptAnswer] = field(default_factory=list)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    requests: int = 0
    waiting: int = 0

    async def enter(self, timeout_s: float) -> None:
        """Wait until the trajectory is admitted to an open turn.

        Raises:
            HeldTooLong: after ``timeout_s`` seconds.
        """
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self.turn <= max(self.left, self.gate.closed):
                    self.admitted.clear()
                    await self.admitted.wait()
        except TimeoutError:
            raise HeldTooLong(
                f"an interrupted trajectory waited {timeout_s:g} s for its next generation turn; training, a weight "
                "sync, a checkpoint and a validation together should take less (async_training.timeouts)"
            ) from None
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        """A server gave a request back: wait for the next turn."""
        self.left = self.turn

    def again(self, asked: Sequence[int]) -> Any | None:
        """The kept answer to this request, if the record has one; the first of several, whatever their order."""
        if not self.replay:
            return None
        wanted = digest(asked)
        found = next((kept for kept in self.replay if kept.asked == wanted), None)
        if found is None:
            return None
        self.replay.remove(found)
        self.kept.append(found)
        answer = found.answer.model_copy(deep=True)
        self.gate.account.restored += len(answer.token_ids)
        return answer

    def keep(self, asked: Sequence[int], answer: Any) -> None:
        """Record an answer."""
        self.kept.append(KeptAnswer(digest(asked), answer.model_copy(deep=True)))
        self.gate.account.cut += self.kept[-1].cut_tokens

    @property
    def record(self) -> list[KeptAnswer]:
        """Everything it was answered so far."""
        return [*self.kept, *self.replay]

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is under way at a server."""
        self.requests += 1
        self.gate.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            self.gate.requests -= 1
            if self.gate.requests == 0:
                self.gate.settled.set()


class TurnGate:
    """The tickets of one worker's unfinished trajectories.

    Attributes:
        closed: the newest turn that is over.
        requests: how many are under way at servers.
        settled: set when the last of them has been answered.
        account: of the tokens of cut answers, but for those held.
    """

    def __init__(self) -> None:
        self.closed = 0
        self.requests = 0
        self.settled = asyncio.Event()
        self.account = TokenAccount()
        self._tickets: dict[str, Ticket] = {}

    def begin(self, key: str, turn: int, record: bytes | None = None) -> Ticket:
        """A trajectory begins, admitted to ``turn``; ``record`` is what :meth:`export` gave for it earlier.

        The record comes from a checkpoint of this run, which is trusted like its code.
        """
        ticket = Ticket(self, turn, replay=pickle.loads(record) if record else [])
        self._tickets[key] = ticket
        return ticket

    def end(self, key: str, complete: bool) -> None:
        """The trajectory is over; if it is complete, what it was answered is in its payload."""
        ticket = self._tickets.pop(key)
        unused = ticket.replay if complete else ticket.record
        self.account.lost += sum(kept.cut_tokens for kept in unused)

    def close(self, turn: int) -> None:
        """The turn is over: from now on requests wait."""
        self.closed = max(self.closed, turn)
        elsewhere = [
            ticket
            for ticket in self._tickets.values()
            if ticket.turn == turn and not (ticket.sampled.is_set() or ticket.requests or ticket.waiting)
        ]
        self.account.in_tools += len(elsewhere)

    def admit(self, keys: Sequence[str], turn: int) -> None:
        """Let these trajectories go on in ``turn``, in this order; one that is over by now is left out."""
        for key in keys:
            ticket = self._tickets.get(key)
            if ticket is not None:
                ticket.turn = turn
                ticket.admitted.set()

    def account_now(self) -> TokenAccount:
        """The account of this moment."""
        held = sum(kept.cut_tokens for ticket in self._tickets.values() for kept in ticket.record)
        return replace(self.account, held=held)

    async def export(self, timeout_s: float) -> dict[str, bytes | None]:
        """What each unfinished trajectory keeps, by key, None if nothing; waits until no request is under way.

        Raises:
            TimeoutError: a server did not give back a request in time.
        """
        async with asyncio.timeout(timeout_s):
            while self.requests:
                self.settled.clear()
                await self.settled.wait()
        return {
            key: pickle.dumps(ticket.record, protocol=5) if ticket.record else None
            for key, ticket in self._tickets.items()
        }


_ticket: ContextVar[Ticket | None] = ContextVar("recipe_turn_ticket", default=None)


def current_ticket() -> Ticket | None:
    """The ticket of the trajectory that this task belongs to; None in validation."""
    return _ticket.get()


def use_ticket(ticket: Ticket | None) -> None:
    """Make ``ticket`` the one of this task and of those it starts."""
    _ticket.set(ticket)

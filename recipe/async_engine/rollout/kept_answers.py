# SPDX-License-Identifier: Apache-2.0
"""What a trajectory has been answered, so that no token of it is sampled twice.

Contract: every answer of a server, whole or cut, is kept with a digest of the tokens that it answered. A checkpoint
has these answers of each unfinished trajectory, the tokens so far of a request under way among them, as an answer that
was cut. A trajectory that begins with such a record runs its agent loop from the start, and its requests are answered
from the record where they ask for the same tokens. Where a tool answers differently the second time, what the record
has beyond it is unused, and counted as lost.

No Ray, no engine: one event loop calls it. Shown by tests/integration/test_kept_answers.py.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from recipe.async_engine.engines.answers import ABORTED, CHECKPOINT, Flight


@dataclass(frozen=True)
class KeptAnswer:
    """One answer of a server, perhaps cut, and the digest of the tokens that it answered."""

    asked: bytes
    answer: Any

    @property
    def cut_tokens(self) -> int:
        """Its tokens if it was cut."""
        return len(self.answer.token_ids) if self.answer.stop_reason in ABORTED else 0


@dataclass(frozen=True)
class TrajectoryRecord:
    """The answers of an unfinished trajectory, as a checkpoint holds them.

    answers: pickled list of :class:`KeptAnswer`; it comes from this run, which is trusted like its code. cut_tokens: of
    cut answers among them. under_way_tokens: of these, the tokens of requests that went on after the record was made.
    """

    answers: bytes
    cut_tokens: int
    under_way_tokens: int


@dataclass
class TokenAccount:
    """What became of the tokens of cut answers, since a worker or the run began: cut = trained + lost + cached.

    cut: sampled before an interruption. lost: of trajectories that failed or were given up, or that a tool answered
    differently after a restart. in_tools: trajectories that were interrupted while none of their requests was under
    way. held: tokens of cut answers that a worker's unfinished trajectories have at this moment. Cached are those that
    a snapshot has.
    """

    cut: int = 0
    lost: int = 0
    in_tools: int = 0
    held: int = 0
    trained: int = 0

    def __add__(self, other: TokenAccount) -> TokenAccount:
        return TokenAccount(*[one + another for one, another in zip(astuple(self), astuple(other), strict=True)])

    def held_as_lost(self) -> TokenAccount:
        """The same once the worker has died: what was held is lost."""
        return replace(self, lost=self.lost + self.held, held=0)


@dataclass
class TokenFlow:
    """Tokens that a worker's trajectories were answered with, of this start of the run.

    received: all of them. dropped: of trajectories that ended without a payload. unfinished: of those that had not
    ended when the run did.
    """

    received: int = 0
    dropped: int = 0
    unfinished: int = 0

    def __add__(self, other: TokenFlow) -> TokenFlow:
        return TokenFlow(*[one + another for one, another in zip(astuple(self), astuple(other), strict=True)])


@dataclass(frozen=True)
class Exported:
    """What the workers told of their unfinished trajectories.

    records: by the call's key, None if nothing is kept of it. over: keys of calls that were over for their workers, so
    that their payloads are on their way. account: of all workers together.
    """

    records: dict[str, TrajectoryRecord | None]
    over: set[str]
    account: TokenAccount


def digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass
class TrajectoryAnswers:
    """The answers of one trajectory.

    Attributes:
        account: of its worker.
        kept: its answers so far, in order.
        replay: answers of an earlier process that are to be given again.
        flights: its requests under way at servers.
        restored_tokens: tokens of the answers that were given again.
        received_tokens: of those that servers gave, cut parts included.
        over: the trajectory has ended, though its agent loop may go on.
    """

    account: TokenAccount = field(default_factory=TokenAccount)
    kept: list[KeptAnswer] = field(default_factory=list)
    replay: list[KeptAnswer] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    restored_tokens: int = 0
    received_tokens: int = 0
    over: bool = False

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
        self.restored_tokens += len(found.answer.token_ids)
        return found.answer

    def keep(self, asked: Sequence[int], answer: Any) -> None:
        """Record an answer, which nobody changes from now on."""
        self.kept.append(KeptAnswer(digest(asked), answer))
        self.account.cut += self.kept[-1].cut_tokens
        self.received_tokens += len(answer.token_ids)

    @property
    def record(self) -> list[KeptAnswer]:
        """Every answer that it has, given again or not."""
        return [*self.kept, *self.replay]

    def export(self) -> TrajectoryRecord | None:
        """What a checkpoint keeps of this trajectory; None if that is nothing."""
        cut = [(flight.asked, flight.cut_answer(CHECKPOINT)) for flight in self.flights]
        under_way = [KeptAnswer(digest(asked), answer) for asked, answer in cut if answer is not None]
        answers = [*self.record, *under_way]
        if not answers:
            return None
        return TrajectoryRecord(
            pickle.dumps(answers, protocol=5),
            sum(kept.cut_tokens for kept in answers),
            sum(kept.cut_tokens for kept in under_way),
        )


class AnswerBook:
    """The answers of one worker's unfinished trajectories."""

    def __init__(self) -> None:
        self._account = TokenAccount()
        self._flow = TokenFlow()
        self._is_closed = False
        self._answers: dict[str, TrajectoryAnswers] = {}

    def begin(self, key: str, record: TrajectoryRecord | None = None) -> TrajectoryAnswers:
        """A trajectory begins; ``record`` is what :meth:`export` gave for it in an earlier process."""
        replay = [] if record is None else pickle.loads(record.answers)
        answers = self._answers[key] = TrajectoryAnswers(self._account, replay=replay)
        return answers

    def end(self, key: str, complete: bool) -> None:
        """The trajectory is over; if it is complete, what it was answered is in its payload."""
        answers = self._answers.pop(key)
        answers.over = True
        unused = answers.replay if complete else answers.record
        self._account.lost += sum(kept.cut_tokens for kept in unused)
        self._flow.received += answers.received_tokens
        if not complete and self._is_closed:
            self._flow.unfinished += answers.received_tokens
        elif not complete:
            self._flow.dropped += answers.received_tokens

    def close(self) -> None:
        """The run is over: what ends without a payload from now on was unfinished."""
        self._is_closed = True

    def flow(self) -> TokenFlow:
        """Of the trajectories that have ended."""
        return replace(self._flow)

    def interrupted_in_tools(self, trajectories: int) -> None:
        """So many were interrupted while none of their requests was under way."""
        self._account.in_tools += trajectories

    def flights(self) -> list[Flight]:
        """The requests under way of all these trajectories."""
        return [flight for answers in self._answers.values() for flight in answers.flights]

    def account(self) -> TokenAccount:
        """The account of this moment."""
        held = sum(kept.cut_tokens for answers in self._answers.values() for kept in answers.record)
        return replace(self._account, held=held)

    def export(self) -> dict[str, TrajectoryRecord | None]:
        """What each unfinished trajectory keeps, by key, None if nothing."""
        return {key: answers.export() for key, answers in self._answers.items()}

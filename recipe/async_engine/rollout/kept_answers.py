# SPDX-License-Identifier: Apache-2.0
"""One trajectory at its agent-loop worker: what it has been answered, how it ends, and what a checkpoint keeps of it.

Contract:

* verl's agent loops know nothing of versions, so the client that they call records every answered request in the
  trajectory's `TrajectoryRecorder`, in order. The client finds the recorder through a context variable, which asyncio
  passes on to the tasks that an agent loop starts.
* Every answer of a server, whole or cut, is kept with a digest of the tokens that it answered. A checkpoint holds the
  answers of each unfinished trajectory. The tokens so far of a request under way are among them, as a cut answer.
* A trajectory that begins with such a record runs its agent loop from the start. Its requests are answered from the
  record as long as they ask for the same tokens, so no token is sampled twice. If a tool answers differently the second
  time, the rest of the record is not used, and its tokens count as lost.

Only one event loop calls this module. Shown by tests/integration/test_kept_answers.py and test_client.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from array import array
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from recipe.async_engine.engines.answers import ABORTED, CHECKPOINT, Flight
from recipe.async_engine.log_prob_servers.client import PartScorer
from recipe.async_engine.record.activity import ToolTime, Work


@dataclass(frozen=True)
class KeptAnswer:
    """One answer of a server, whole or cut, and the digest of the tokens that it answered."""

    asked: bytes
    answer: Any

    @property
    def cut_tokens(self) -> int:
        """The number of tokens of a cut answer; 0 for a whole one."""
        return len(self.answer.token_ids) if self.answer.stop_reason in ABORTED else 0


@dataclass(frozen=True)
class TrajectoryRecord:
    """The answers of an unfinished trajectory, as a checkpoint holds them.

    Attributes:
        answers: a pickled list of `KeptAnswer`. It comes from this run, which is trusted like its code.
        cut_tokens: tokens of the cut answers in the list.
        under_way_tokens: the part of ``cut_tokens`` whose requests continued after the record was made.
    """

    answers: bytes
    cut_tokens: int
    under_way_tokens: int


@dataclass
class TokenAccount:
    """What became of the tokens that servers answered, since a worker or the run began.

    For cut answers ``cut = trained + lost + cached``, where the cached tokens are those that a checkpoint holds.

    Attributes:
        cut: tokens of answers that were cut.
        lost: tokens of cut answers whose trajectories failed or were given up, or whose tool answered differently after
            a restart.
        in_tools: trajectories that were interrupted while none of their requests was under way.
        held: tokens of cut answers that belong to the worker's unfinished trajectories at this moment.
        trained: tokens of cut answers that were trained.
        received: all tokens that the ended trajectories were answered with.
        dropped: the received tokens of trajectories that ended without a payload.
        unfinished: the received tokens of trajectories that had not ended when the run did.
    """

    cut: int = 0
    lost: int = 0
    in_tools: int = 0
    held: int = 0
    trained: int = 0
    received: int = 0
    dropped: int = 0
    unfinished: int = 0

    def __add__(self, other: TokenAccount) -> TokenAccount:
        return TokenAccount(*[one + another for one, another in zip(astuple(self), astuple(other), strict=True)])

    def held_as_lost(self) -> TokenAccount:
        """Return the account of a worker that has died: the tokens that it held are lost."""
        return replace(self, lost=self.lost + self.held, held=0)


def digest(token_ids: Sequence[int]) -> bytes:
    """Return a digest by which two equal token sequences are recognised."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass
class TrajectoryRecorder:
    """The answered requests of one trajectory, and the state of its agent loop.

    Attributes:
        segments: (version, token ids) of every answer with tokens, in the order of the answers.
        interruptions: how often a weight sync or a server's death cut an answer that was then resumed.
        cut_tokens: tokens of the cut parts. All of them are in ``segments``.
        reprefilled_tokens: prompt and kept tokens that a resumed request sent to an engine again.
        recovered_tokens: tokens that were fetched from a server before it died.
        account: the token account of the worker.
        kept: the answers so far, in order.
        replay: answers of an earlier process that are to be given again.
        flights: the trajectory's requests under way at servers.
        restored_tokens: tokens of the answers that were given again.
        received_tokens: tokens that servers answered, cut parts included.
        scorer: has log-prob servers score the answers. None if there are no such servers, or if they cannot score this
            trajectory.
        text_only: whether only tokens went to an engine. Log-prob servers cannot score images.
        work: the purpose of the trajectory's requests.
        order: the number of its group in the order of issue. Engines that schedule by priority take older groups first.
        tools: measures how long the trajectory was in tools.
        asked_s: seconds in which the trajectory waited for servers.
        sampled: done when the last token is sampled.
        told: done when somebody asked for the trajectory's end.
        over: set when the trajectory has ended, even if its agent loop goes on.
        task: the task that runs the agent loop.
    """

    segments: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    interruptions: int = 0
    cut_tokens: int = 0
    reprefilled_tokens: int = 0
    recovered_tokens: int = 0
    account: TokenAccount = field(default_factory=TokenAccount)
    kept: list[KeptAnswer] = field(default_factory=list)
    replay: list[KeptAnswer] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    restored_tokens: int = 0
    received_tokens: int = 0
    scorer: PartScorer | None = None
    text_only: bool = True
    work: Work = Work.NEW
    order: int = 0
    tools: ToolTime = field(default_factory=ToolTime)
    asked_s: float = 0.0
    sampled: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    told: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Any] = field(init=False)

    @property
    def validates(self) -> bool:
        """Whether the trajectory belongs to a validation, so that nothing of it is trained."""
        return self.work is Work.VALIDATION

    def mark_multimodal(self) -> None:
        """Note that a request has more than tokens, so that log-prob servers cannot score this trajectory."""
        self.text_only = False
        self.drop_scores()

    def drop_scores(self) -> None:
        """Cancel the scoring of this trajectory, because nobody waits for it."""
        if self.scorer is not None:
            self.scorer.cancel()
        self.scorer = None

    def record(self, version: int, token_ids: list[int], context: list[int]) -> None:
        """Note that ``version`` sampled ``token_ids`` after ``context``."""
        if not token_ids:
            return
        self.segments.append((version, tuple(token_ids)))
        if self.scorer is not None:
            self.scorer.add(version, context, token_ids)

    def again(self, asked: Sequence[int]) -> Any | None:
        """Return the kept answer to this request, or None if the record of an earlier process has none.

        If several answers match, the first one is returned.
        """
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
        """Keep an answer, which nobody may change from now on."""
        self.kept.append(KeptAnswer(digest(asked), answer))
        self.account.cut += self.kept[-1].cut_tokens
        self.received_tokens += len(answer.token_ids)

    @property
    def answers(self) -> list[KeptAnswer]:
        """All answers of the trajectory, including those that have not been given again yet."""
        return [*self.kept, *self.replay]

    def export(self) -> TrajectoryRecord | None:
        """Return what a checkpoint keeps of this trajectory, or None if that is nothing."""
        cut = [(flight.asked, flight.cut_answer(CHECKPOINT)) for flight in self.flights]
        under_way = [KeptAnswer(digest(asked), answer) for asked, answer in cut if answer is not None]
        answers = [*self.answers, *under_way]
        if not answers:
            return None
        return TrajectoryRecord(
            pickle.dumps(answers, protocol=5),
            sum(kept.cut_tokens for kept in answers),
            sum(kept.cut_tokens for kept in under_way),
        )


_current: ContextVar[TrajectoryRecorder | None] = ContextVar("recipe_trajectory_recorder", default=None)


def current_recorder() -> TrajectoryRecorder | None:
    """Return the recorder of the trajectory that this task belongs to, or None outside of a trajectory."""
    return _current.get()


def start_recording(recorder: TrajectoryRecorder | None = None) -> TrajectoryRecorder:
    """Begin a trajectory in this context, with the given recorder or a new one, and return the recorder."""
    recorder = recorder or TrajectoryRecorder()
    _current.set(recorder)
    return recorder


class AnswerBook:
    """The recorders of one worker's unfinished training trajectories, and the worker's token account."""

    def __init__(self) -> None:
        self._account = TokenAccount()
        self._is_closed = False
        self._under_way: dict[str, TrajectoryRecorder] = {}

    def begin(self, key: str, record: TrajectoryRecord | None = None, **fields: Any) -> TrajectoryRecorder:
        """Begin a trajectory and return its recorder.

        Args:
            key: the name of the attempt.
            record: what `export` returned for the trajectory in an earlier process.
            fields: further fields of the recorder.
        """
        replay = [] if record is None else pickle.loads(record.answers)
        recorder = self._under_way[key] = TrajectoryRecorder(account=self._account, replay=replay, **fields)
        return recorder

    def end(self, key: str, complete: bool) -> None:
        """Count the tokens of a trajectory that has ended; ``complete`` says whether it has a payload."""
        recorder = self._under_way.pop(key)
        unused = recorder.replay if complete else recorder.answers
        self._account.lost += sum(kept.cut_tokens for kept in unused)
        self._account.received += recorder.received_tokens
        if not complete and self._is_closed:
            self._account.unfinished += recorder.received_tokens
        elif not complete:
            self._account.dropped += recorder.received_tokens

    def close(self) -> None:
        """Count trajectories that end without a payload as unfinished from now on, because the run is over."""
        self._is_closed = True

    def interrupted_in_tools(self, trajectories: int) -> None:
        """Count trajectories that were interrupted while none of their requests was under way."""
        self._account.in_tools += trajectories

    def flights(self) -> list[Flight]:
        """Return the requests under way of all these trajectories."""
        return [flight for recorder in self._under_way.values() for flight in recorder.flights]

    def account(self) -> TokenAccount:
        """Return the account of this moment."""
        held = sum(kept.cut_tokens for recorder in self._under_way.values() for kept in recorder.answers)
        return replace(self._account, held=held)

    def export(self) -> dict[str, TrajectoryRecord | None]:
        """Return what a checkpoint keeps of each unfinished trajectory, by key, with None for nothing."""
        return {key: recorder.export() for key, recorder in self._under_way.items()}

# SPDX-License-Identifier: Apache-2.0
"""Records the answers that an agent-loop worker's trajectories get from rollout servers, so that checkpoints have them.

Contract:

* The client that agent loops call records every answer, and the version that sampled it, in the trajectory's
  `TrajectoryRecorder`: verl's agent loops do not know versions. The client finds the recorder through a context
  variable, which asyncio passes on to the tasks that an agent loop starts.
* Every answer of a server, complete or interrupted, is kept with a digest of the request's tokens and images. A
  checkpoint has the kept answers of each unfinished trajectory. For an open request it has the tokens sampled so far,
  as an interrupted answer.
* A trajectory that is restored from a checkpoint runs its agent loop from the beginning. As long as its requests have
  the same tokens and images as before, they get the kept answers, so no token is sampled twice. If a tool returns
  something else than before the restart, the remaining kept answers are not used, and their tokens count as lost.

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

from recipe.async_engine.core.versions import Context, context_of
from recipe.async_engine.engines.answers import ABORTED, CHECKPOINT, Flight
from recipe.async_engine.log_prob_servers.client import PartScorer
from recipe.async_engine.record.activity import ToolTime, Work
from recipe.async_engine.rollout.chosen_experts import ChosenExperts


@dataclass(frozen=True)
class KeptAnswer:
    """One answer of a server, complete or interrupted, and the digest of its request (``asked``)."""

    asked: bytes
    answer: Any

    @property
    def cut_tokens(self) -> int:
        """Number of tokens of the answer if it was interrupted; 0 for a complete answer."""
        return len(self.answer.token_ids) if self.answer.stop_reason in ABORTED else 0


@dataclass(frozen=True)
class TrajectoryRecord:
    """The answers of an unfinished trajectory, as a checkpoint holds them.

    Attributes:
        answers: a pickled list of `KeptAnswer`. It has to come from a trusted source, because unpickling can run code.
        cut_tokens: number of tokens in interrupted answers. An answer that was still being sampled when the checkpoint
            was taken counts as interrupted.
        under_way_tokens: the part of ``cut_tokens`` in answers that were still being sampled.
    """

    answers: bytes
    cut_tokens: int
    under_way_tokens: int


@dataclass
class TokenAccount:
    """Counts what became of the tokens that rollout servers returned, for one agent-loop worker or for all of a run.

    In a checkpoint, ``cut = trained + lost + cached``. ``cached`` is no attribute: it is the number of tokens in those
    interrupted answers that the checkpoint contains.

    Attributes:
        cut: number of tokens in interrupted answers.
        lost: number of these tokens that will not be trained, because their trajectory failed or was cancelled, or
            because a tool returned something else after a restart than before it.
        in_tools: number of trajectories that had no open request, usually because a tool ran, when generation stopped
            for a training step.
        held: number of tokens in interrupted answers of unfinished trajectories.
        trained: number of tokens in interrupted answers that were trained.
        received: number of all tokens that servers returned to trajectories which have ended.
        dropped: number of received tokens whose trajectories failed or were cancelled.
        unfinished: number of received tokens whose trajectories were still running when the run ended.
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
        """Return a copy in which the tokens of ``held`` are moved to ``lost``, because their worker has died."""
        return replace(self, lost=self.lost + self.held, held=0)


def digest(token_ids: Sequence[int], media: Sequence[Any] = ()) -> bytes:
    """Return a digest of 16 bytes that identifies a request: its tokens, and its images, videos and audio.

    The tokens alone do not identify a request, because different images of the same size have the same tokens.
    """
    shown = pickle.dumps(media) if any(media) else b""
    return hashlib.blake2b(array("q", token_ids).tobytes() + shown, digest_size=16).digest()


@dataclass
class TrajectoryRecorder:
    """The servers' answers to one trajectory, and the state of its agent loop.

    Attributes:
        segments: (version, token ids) for each run of tokens that one version sampled, in the order of sampling.
        contexts: for each of ``segments``, the result of `context_of` for the tokens before it.
        interruptions: number of times that a weight sync or a server's death interrupted an answer, which was resumed.
        cut_tokens: number of tokens in the interrupted parts of answers. All these tokens are also in ``segments``.
        reprefilled_tokens: number of prompt and answer tokens that an engine had to read again after interruptions.
        recovered_tokens: number of tokens that were fetched from a server before it died.
        account: the token counts of the worker.
        kept: the answers so far, in order.
        replay: answers from a checkpoint that have not been used yet.
        flights: the trajectory's open requests at servers.
        restored_tokens: number of tokens in answers from a checkpoint that were used.
        received_tokens: number of tokens that servers returned, including interrupted parts.
        scorer: sends the answers to log-prob servers. None if there are none, or if they cannot score this trajectory.
        text_only: whether no request has images, video or audio, which log-prob servers cannot score.
        order: the group's number in the order of issue. Engines that schedule by priority serve lower numbers first.
        asked_s: seconds for which the trajectory waited for servers.
        sampled: a future that is done when the last token is sampled.
        told: a future that is done when the trajectory's cancellation was requested.
        over: set when the trajectory has ended, even if its agent loop continues.
        experts: the experts that routers chose for the tokens of the trajectory.
    """

    segments: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
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
    experts: ChosenExperts = field(default_factory=ChosenExperts)
    task: asyncio.Task[Any] = field(init=False)

    @property
    def validates(self) -> bool:
        return self.work is Work.VALIDATION

    def mark_multimodal(self) -> None:
        """Record that a request has images, video or audio, and send no more answers to log-prob servers."""
        self.text_only = False
        self.drop_scores()

    def drop_scores(self) -> None:
        if self.scorer is not None:
            self.scorer.cancel()
        self.scorer = None

    def record(self, version: int, token_ids: list[int], context: list[int]) -> None:
        """Record that ``version`` sampled ``token_ids`` after the tokens ``context``."""
        if not token_ids:
            return
        self.segments.append((version, tuple(token_ids)))
        self.contexts.append(context_of(context))
        if self.scorer is not None:
            self.scorer.add(version, context, token_ids)

    def again(self, asked: bytes) -> Any | None:
        """Return the first unused answer from the checkpoint to a request with the digest ``asked``, or None.

        The answer then counts as used.
        """
        found = next((kept for kept in self.replay if kept.asked == asked), None)
        if found is None:
            return None
        self.replay.remove(found)
        self.kept.append(found)
        self.restored_tokens += len(found.answer.token_ids)
        return found.answer

    def keep(self, asked: bytes, answer: Any) -> None:
        """Keep the answer to a request with the digest ``asked``. The caller must not change the answer afterwards."""
        self.kept.append(KeptAnswer(asked, answer))
        self.account.cut += self.kept[-1].cut_tokens
        self.received_tokens += len(answer.token_ids)

    @property
    def answers(self) -> list[KeptAnswer]:
        """All answers of the trajectory, including those from the checkpoint that have not been used yet."""
        return [*self.kept, *self.replay]

    def export(self) -> TrajectoryRecord | None:
        """Return the answers of this trajectory for a checkpoint, or None if there are none."""
        cut = [(flight.asked, flight.cut_answer(CHECKPOINT)) for flight in self.flights]
        under_way = [KeptAnswer(asked, answer) for asked, answer in cut if answer is not None]
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
    """Return the recorder of the trajectory for which the current task runs, or None if there is none."""
    return _current.get()


def start_recording(recorder: TrajectoryRecorder | None = None) -> TrajectoryRecorder:
    """Make the given recorder, or a new one, the recorder of the current context, and return it."""
    recorder = recorder or TrajectoryRecorder()
    _current.set(recorder)
    return recorder


class AnswerBook:
    """The recorders of a worker's unfinished training trajectories, and the token counts of the worker."""

    def __init__(self) -> None:
        self._account = TokenAccount()
        self._is_closed = False
        self._under_way: dict[str, TrajectoryRecorder] = {}

    def begin(self, key: str, record: TrajectoryRecord | None = None, **fields: Any) -> TrajectoryRecorder:
        """Create the recorder of a new attempt at a trajectory. ``key`` is the name of the attempt.

        ``record`` has the trajectory's answers from a checkpoint, if any. ``fields`` sets further fields of the
        recorder.
        """
        replay = [] if record is None else pickle.loads(record.answers)
        recorder = self._under_way[key] = TrajectoryRecorder(account=self._account, replay=replay, **fields)
        return recorder

    def end(self, key: str, complete: bool) -> None:
        """Count the tokens of an attempt that has ended. ``complete`` says whether the attempt succeeded."""
        recorder = self._under_way.pop(key)
        unused = recorder.replay if complete else recorder.answers
        self._account.lost += sum(kept.cut_tokens for kept in unused)
        self._account.received += recorder.received_tokens
        if not complete and self._is_closed:
            self._account.unfinished += recorder.received_tokens
        elif not complete:
            self._account.dropped += recorder.received_tokens

    def close(self) -> None:
        """From now on, count the tokens of failed and cancelled attempts as ``unfinished``, because the run is over."""
        self._is_closed = True

    def interrupted_in_tools(self, trajectories: int) -> None:
        """Add ``trajectories`` to `TokenAccount.in_tools`."""
        self._account.in_tools += trajectories

    def flights(self) -> list[Flight]:
        return [flight for recorder in self._under_way.values() for flight in recorder.flights]

    def account(self) -> TokenAccount:
        held = sum(kept.cut_tokens for recorder in self._under_way.values() for kept in recorder.answers)
        return replace(self._account, held=held)

    def export(self) -> dict[str, TrajectoryRecord | None]:
        """Return each unfinished attempt's answers (None if there are none) for a checkpoint, by the attempt's key."""
        return {key: recorder.export() for key, recorder in self._under_way.items()}

# SPDX-License-Identifier: Apache-2.0
"""The serving loop of a log-prob server: it takes requests, sends batches to the engine, and promotes versions.

:class:`~recipe.async_engine.core.scoring.ScoringQueue` makes the decisions, and this module carries them out. Contract:

- Every request ends with its scores, with `Unscored` if its version will not come to this server or its batch could not
  be computed, or with the death of the server's process. The request of a caller that goes away is dropped.
- The engine does one thing at a time: a batch, or a promotion. Weights are promoted once every rank has them.
- A batch that fails affects only itself. A failed promotion ends the process, because the ranks may then have different
  versions, and so does the loss of the engine or an error of the loop itself, so that no caller waits in vain.

Shown by tests/integration/test_scoring_service.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.scoring import Promotion, ScoringBatch, ScoringQueue, ScoringRequest, ScoringSettings
from recipe.async_engine.record.events import Class, Lane

logger = logging.getLogger(__name__)


class Unscored(RecipeError):
    """A request was not scored: its version is not available, its batch failed, or no server answered in time."""


class EngineLost(RecipeError):
    """The engine will not compute anything any more."""


@dataclass(frozen=True)
class Segment:
    """Some tokens of a sequence, and what came before them.

    Attributes:
        token_ids: int32 (L,), the sequence up to the last token wanted.
        first: position of the first token wanted.
    """

    token_ids: np.ndarray
    first: int


class ScoringEngine(Protocol):
    """The interface of the ranks behind a server."""

    async def score(self, sequences: Sequence[Any]) -> Sequence[Any]:
        """Return the sequences' scores by the live weights, in order; errors except EngineLost fail only this batch."""

    async def promote(self, version: int) -> None:
        """Make the staged weights of this version the live ones on every rank."""


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        scores: what the engine computed.
        version: the version that computed it.
        late: whether another version than the requested one computed it.
        queued_s: seconds from the request's arrival to the start of its batch.
    """

    scores: Any
    version: int
    late: bool
    queued_s: float


@dataclass
class ServiceCounts:
    """Totals since the service started."""

    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    late: int = 0
    queued_s: float = 0.0
    busy_s: float = 0.0
    fill: float = 0.0
    """Sum over the batches of tokens / ``max_batch_tokens``."""


class ScoringService:
    """The serving loop and its interface; all calls must come from one event loop."""

    def __init__(
        self,
        settings: ScoringSettings,
        engine: ScoringEngine,
        lost: Callable[[BaseException], None],
        live: int | None = None,
        ranks: int = 1,
    ) -> None:
        """``lost``: called with the reason when nothing will be computed any more; it must end the process."""
        self.counts = ServiceCounts()
        self._settings = settings
        self._queue = ScoringQueue(settings, live)
        self._engine = engine
        self._lost = lost
        self._wake = asyncio.Event()
        self._rank_count, self._ranks_staged, self._ranks_joined = ranks, 0, 0
        self._may_stage = asyncio.Event()
        self._answers: dict[int, tuple[Any, asyncio.Future[Answer]]] = {}
        self._numbers = 0
        self._refused: int | None = None
        self.lane = Lane(time.monotonic, self._waits_for)

    @property
    def live(self) -> int | None:
        """The version that answers now; None before the first one."""
        return self._queue.live

    @property
    def waiting(self) -> int:
        """Number of requests that have no answer yet and are not being computed."""
        return len(self._queue)

    @property
    def _waits_for(self) -> Class:
        return Class.START_UP if self._queue.live is None else Class.WAIT_REQUESTS

    def run(self) -> None:
        """Start to serve, on the event loop from which all calls come."""
        self._loop = asyncio.create_task(self._run(), name="scoring service")

    # Requests

    async def score(self, sequence: Any, tokens: int, version: int, start: int) -> Answer:
        """Score one sequence, which the engine gets unchanged; other arguments are those of `ScoringRequest`.

        Raises:
            Unscored: the request's version will not come to this server, or its batch failed.
        """
        self._numbers += 1
        request = ScoringRequest(self._numbers, version, tokens, start, time.monotonic())
        if not self._queue.submit(request):
            raise Unscored(f"version {version} is not here, nor being loaded; the newest is {self._queue.newest}")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[request.id] = sequence, answer
        self._wake.set()
        try:
            return await answer
        finally:
            self._queue.withdraw(request.id)
            self._answers.pop(request.id, None)

    def pause_serving(self) -> None:
        """Compute nothing until `resume_serving`; requests are still accepted, and versions still move on."""
        self._queue.paused = True

    def resume_serving(self) -> None:
        self._queue.paused = False
        self._wake.set()

    # Weights

    async def begin_join(self) -> None:
        """Return when a rank may join the group of a weight sync, which is a collective.

        If nothing may be scored beside a collective, scoring stops until every rank has called `joined`: ranks that
        start collectives in different orders wait for each other for ever.
        """
        self._queue.joining = self._settings.holds_for_weights
        while not self._queue.may_join:
            self._may_stage.clear()
            await self._may_stage.wait()

    def joined(self) -> None:
        """Record that one rank has started its part of the collective, or failed to."""
        self._ranks_joined = (self._ranks_joined + 1) % self._rank_count
        if not self._ranks_joined:
            self._queue.joining = False
            self._wake.set()

    async def begin_load(self, version: int, timeout_s: float) -> None:
        """Return when a rank may receive weights, at the same moment for all ranks.

        The first call announces the version. Weights staged earlier are promoted first. If this takes too long, the
        load is cancelled and TimeoutError is raised.
        """
        if self._queue.loading != version:
            self._queue.begin_load(version)
            self._ranks_staged = 0
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._queue.may_stage:
                    self._may_stage.clear()
                    await self._may_stage.wait()
        except BaseException:
            self._drop_load(f"version {version} found no place")
            raise

    def staged(self) -> None:
        """Record that one rank has staged the announced weights completely."""
        self._ranks_staged += 1
        if self._ranks_staged == self._rank_count:
            self._queue.staged(time.monotonic())
            self._refused = None
            self._wake.set()

    def load_failed(self, reason: str) -> None:
        """Give up the announced weights, because a rank could not load them."""
        self._drop_load(reason)

    def _drop_load(self, reason: str) -> None:
        for request in self._queue.load_failed():
            self._end(request.id, Unscored(f"version {request.version} did not come: {reason}"))
        self._wake.set()

    def refuse(self, version: int, reason: str) -> None:
        """Mark the weights that arrived as ``version`` as wrong; nothing is scored until other weights are live."""
        self._refused = version
        for request in self._queue.refused():
            self._end(request.id, Unscored(f"version {request.version} is not here: {reason}"))
        self._wake.set()

    def _end(self, request_id: int, result: Answer | BaseException) -> None:
        _, answer = self._answers.get(request_id, (None, None))
        if answer is None or answer.done():
            return
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    async def _run(self) -> None:
        try:
            while True:
                action = self._queue.next(time.monotonic())
                if isinstance(action, Promotion):
                    self.lane.turn_to(Class.WAIT_WEIGHTS)
                    await self._engine.promote(action.version)
                    self._queue.promoted()
                    self._may_stage.set()
                elif action is not None:
                    self.lane.turn_to(Class.LOG_PROBS)
                    await self._compute(action)
                else:
                    self.lane.turn_to(self._waits_for)
                    await self._sleep()
        except Exception as error:  # from the engine, from a promotion that may be incomplete, or a defect
            logger.exception("the serving loop of the log-prob server failed")
            self._lost(error)

    async def _sleep(self) -> None:
        """Wait until something happens or the queue has to be asked again."""
        wake_at = self._queue.wake_at()
        timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        self._wake.clear()

    async def _compute(self, batch: ScoringBatch) -> None:
        began = time.monotonic()
        sequences = [self._answers[request.id][0] for request in batch.requests]
        try:
            scores = await self._engine.score(sequences)
            if len(scores) != len(sequences):
                raise ValueError(f"the engine gave {len(scores)} scores")
            if batch.version == self._refused:
                raise ValueError(f"the weights of version {batch.version} were refused meanwhile")
        except EngineLost:
            raise
        except Exception as error:
            failed = Unscored(f"{len(sequences)} sequences could not be scored: {type(error).__name__}: {error}")
            failed.__cause__ = error
            for request in batch.requests:
                self._end(request.id, failed)
        else:
            self._count(batch, began)
            for request, result in zip(batch.requests, scores, strict=True):
                late = request.id in batch.late
                self._end(request.id, Answer(result, batch.version, late, began - request.arrived))
        finally:
            self._queue.scored()
            self._may_stage.set()

    def _count(self, batch: ScoringBatch, began: float) -> None:
        counts = self.counts
        counts.batches += 1
        counts.sequences += len(batch.requests)
        counts.tokens += batch.tokens
        counts.late += len(batch.late)
        counts.queued_s += sum(began - request.arrived for request in batch.requests)
        counts.busy_s += time.monotonic() - began
        counts.fill += batch.tokens / self._settings.max_batch_tokens

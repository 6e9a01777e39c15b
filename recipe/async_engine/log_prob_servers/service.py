# SPDX-License-Identifier: Apache-2.0
"""The serving loop of a log-prob server, which takes requests, sends batches to the engine, and promotes versions.

A version is *staged* when its weights are complete in memory, next to those in use, and *live* when its weights are in
use. To promote a version means to make its staged weights the live ones.
:class:`~recipe.async_engine.core.scoring.ScoringQueue` decides what to do next, and this module does it. Contract:

- Every request ends in one of three ways: with its scores; with `Unscored`, if this server will not get the request's
  version or the batch failed; or with the death of the server's process. A request whose caller no longer waits is
  dropped.
- The engine either scores a batch or promotes a version, never both at once. A version is promoted only after every
  rank has staged it.
- A batch that fails does not affect other batches. After a failed promotion the process ends, because the ranks may
  have different versions. The process also ends when the engine is lost or the loop has an error, so that callers do
  not wait for ever.

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
    """A sequence was not scored: its version is unavailable, its batch failed, or no server answered in time."""


class EngineLost(RecipeError):
    """The engine of a log-prob server cannot compute any more, because one of its ranks died or does not answer."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens to score, with the context before them.

    Attributes:
        token_ids: int32 (L,), the context followed by the tokens to score.
        first: index of the first token to score.
    """

    token_ids: np.ndarray
    first: int


class ScoringEngine(Protocol):
    """The methods that the scoring service calls on its engine. The engine consists of one or more ranks."""

    async def score(self, sequences: Sequence[Any]) -> Sequence[Any]:
        """Return the scores of each sequence under the live weights, in the same order.

        If this raises EngineLost, the server's process ends. Any other error makes only this batch fail.
        """

    async def promote(self, version: int) -> None:
        """Make the staged weights of ``version`` the live weights on every rank."""


@dataclass(frozen=True)
class Answer:
    """The answer to a scoring request.

    Attributes:
        scores: log-probs and entropies, as the engine returned them.
        version: the version that computed the scores.
        late: whether ``version`` is not the requested version, because the request came too late.
        queued_s: seconds from the arrival of the request to the start of its batch.
    """

    scores: Any
    version: int
    late: bool
    queued_s: float


@dataclass
class ServiceCounts:
    """Counts of the service's work since it started; `queued_s` and `busy_s` are seconds."""

    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    late: int = 0
    queued_s: float = 0.0
    busy_s: float = 0.0
    fill: float = 0.0
    """Sum, over all batches, of the number of tokens divided by ``max_batch_tokens``."""


class ScoringService:
    """The serving loop of a log-prob server, and the methods that control it. Call all of them on one event loop."""

    def __init__(
        self,
        settings: ScoringSettings,
        engine: ScoringEngine,
        lost: Callable[[BaseException], None],
        live: int | None = None,
        ranks: int = 1,
    ) -> None:
        """``lost`` is called with the error that ended the serving loop, and must end the process."""
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
        """The live version, or None before the first weights."""
        return self._queue.live

    @property
    def waiting(self) -> int:
        """Number of waiting requests, without those that are being scored."""
        return len(self._queue)

    @property
    def _waits_for(self) -> Class:
        return Class.START_UP if self._queue.live is None else Class.WAIT_REQUESTS

    def run(self) -> None:
        self._loop = asyncio.create_task(self._run(), name="scoring service")

    async def score(self, sequence: Any, tokens: int, version: int, start: int) -> Answer:
        """Wait until one sequence has been scored, and return the answer.

        ``sequence`` is passed on to the engine. The other arguments are explained in `ScoringRequest`.

        Raises:
            Unscored: this server will not get the version, or the batch failed.
        """
        self._numbers += 1
        request = ScoringRequest(self._numbers, version, tokens, start, time.monotonic())
        if not self._queue.submit(request):
            raise Unscored(f"version {version} is not here and not being loaded; the newest is {self._queue.newest}")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[request.id] = sequence, answer
        self._wake.set()
        try:
            return await answer
        finally:
            self._queue.withdraw(request.id)
            self._answers.pop(request.id, None)

    def pause_serving(self) -> None:
        """Stop scoring until `resume_serving` is called. Requests and newer versions are still accepted."""
        self._queue.paused = True

    def resume_serving(self) -> None:
        self._queue.paused = False
        self._wake.set()

    async def begin_join(self) -> None:
        """Wait until a rank may join the process group of a weight sync, which is a collective operation.

        With ``holds_for_weights`` scoring stops until every rank has called `joined`. Otherwise ranks could start the
        collectives of the engine and of the sync in different orders, and would wait for each other for ever.
        """
        self._queue.joining = self._settings.holds_for_weights
        while not self._queue.may_join:
            self._may_stage.clear()
            await self._may_stage.wait()

    def joined(self) -> None:
        """Record that one rank has finished joining the process group of a weight sync, with or without success."""
        self._ranks_joined = (self._ranks_joined + 1) % self._rank_count
        if not self._ranks_joined:
            self._queue.joining = False
            self._wake.set()

    async def begin_load(self, version: int, timeout_s: float) -> None:
        """Wait until the ranks may receive the weights of ``version``.

        Every rank calls this, and all calls return at the same time. The first call begins the load. Weights that
        were staged earlier are promoted before the calls return.

        Raises:
            TimeoutError: the ranks were not allowed to receive within ``timeout_s`` seconds, so the load is cancelled.
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
            self._drop_load("the ranks could not receive it")
            raise

    def staged(self) -> None:
        """Record that one more rank has staged all weights of the version that is being loaded."""
        self._ranks_staged += 1
        if self._ranks_staged == self._rank_count:
            self._queue.staged(time.monotonic())
            self._refused = None
            self._wake.set()

    def load_failed(self, reason: str) -> None:
        """Cancel the load of a version, because a rank could not load it; ``reason`` says why."""
        self._drop_load(reason)

    def _drop_load(self, reason: str) -> None:
        for request in self._queue.load_failed():
            self._end(request.id, Unscored(f"version {request.version} did not come: {reason}"))
        self._wake.set()

    def refuse(self, version: int, reason: str) -> None:
        """Mark the received weights of ``version`` as wrong. Scoring stops until another version is live."""
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
        except Exception as error:  # The engine is lost, a promotion failed, or the loop has a defect.
            logger.exception("the serving loop of the log-prob server failed")
            self._lost(error)

    async def _sleep(self) -> None:
        """Wait until there may be work: a request or weights arrive, scoring resumes, or a time limit has passed."""
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
                raise ValueError(f"the engine gave {len(scores)} scores for {len(sequences)} sequences")
            if batch.version == self._refused:
                raise ValueError(f"the weights of version {batch.version} were refused while the batch was scored")
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

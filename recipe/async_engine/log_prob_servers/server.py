# SPDX-License-Identifier: Apache-2.0
"""The Ray actor of a log-prob server, which runs the scoring service and sends batches to the engine's ranks.

Contract: a batch is divided among the data-parallel ranks of the engine, with equal numbers of rows and about equal
numbers of tokens. All processes with the same data-parallel rank get the same rows. If a process dies or does not
answer, the server ends too, so that callers use other servers. Shown by
tests/integration/test_model_engine_server.py.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from ray.exceptions import RayActorError

from recipe.async_engine.actors.stacks import waits
from recipe.async_engine.core.scoring import ScoringSettings
from recipe.async_engine.log_prob_servers.service import Answer, EngineLost, ScoringService, Segment
from recipe.async_engine.log_prob_servers.worker import Place
from recipe.async_engine.record.events import Activity


def deal(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Divide the rows of a batch among ``shares`` data-parallel ranks; return the indices of each rank's rows.

    Rows are given to the ranks from longest to shortest, in ascending and descending order of ranks alternately. The
    shortest row is repeated if necessary, so that all data-parallel ranks get the same number of rows.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    order += [order[-1]] * (-len(order) % shares)
    dealt: list[list[int]] = [[] for _ in range(shares)]
    for number, row in enumerate(order):
        turn, seat = divmod(number, shares)
        dealt[seat if turn % 2 == 0 else shares - 1 - seat].append(row)
    return dealt


class Ranks:
    """Implements `service.ScoringEngine` with the workers of a log-prob server, one for each rank of the engine."""

    def __init__(self, workers: Sequence[ray.actor.ActorHandle], timeout_s: float) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._places: list[Place] = []

    async def find_places(self) -> None:
        """Ask each worker for its `Place` (its rank in data parallelism). This has to be called before `score`."""
        self._places = await self._all([worker.place.remote() for worker in self._workers])

    async def score(self, sequences: Sequence[Segment]) -> list[np.ndarray]:
        """Return log-probs and entropies of each sequence, float32 (2, n), for its n tokens that are to be scored."""
        dealt = deal([len(sequence.token_ids) for sequence in sequences], self._places[0].shares)
        rows = [ray.put([sequences[row].token_ids for row in share]) for share in dealt]
        outputs = await self._all(
            [worker.score.remote(rows[place.share]) for worker, place in zip(self._workers, self._places, strict=True)]
        )
        scores: dict[int, np.ndarray] = {}
        for place, output in zip(self._places, outputs, strict=True):
            if place.has_output:
                scores |= dict(zip(dealt[place.share], output, strict=True))
        return [scores[row][:, sequence.first :] for row, sequence in enumerate(sequences)]

    async def promote(self, version: int) -> None:
        await self._all([worker.promote.remote(version) for worker in self._workers])

    async def _all(self, answers: list[Any]) -> list[Any]:
        # Wait for all ranks, because the first error may be a consequence of another rank's death.
        try:
            async with asyncio.timeout(self._timeout_s):
                outcomes = await asyncio.gather(*answers, return_exceptions=True)
        except TimeoutError:
            raise EngineLost(f"the ranks of a log-prob server did not answer within {self._timeout_s:g} s") from None
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if isinstance(error, RayActorError):
                raise EngineLost(f"a log-prob server cannot go on, because a rank died: {error}") from error
        if errors:
            raise errors[0]
        return outcomes


class ModelEngineServer(ScoringService):
    """The scoring service as a Ray actor.

    Clients call `score`. The ranks and the weight publisher call the methods that control weights.
    """

    def __init__(
        self,
        settings: ScoringSettings,
        workers: Sequence[ray.actor.ActorHandle],
        timeout_s: float,
        live: int | None = None,
    ) -> None:
        """``live`` is the version of the workers' first weights; None if they wait for weights of the trainer."""
        self._ranks = Ranks(workers, timeout_s)
        super().__init__(settings, self._ranks, _end_process, live=live, ranks=len(workers))
        self._answered_tokens = 0
        self._life = uuid4().hex

    async def start(self) -> None:
        await self._ranks.find_places()
        self.run()

    async def score(self, segment: Segment, tokens: int, version: int, start: int) -> Answer:
        """Score a segment, as `ScoringService.score` describes.

        `Answer.scores` has log-probs and entropies of the n tokens that are to be scored, float32 (2, n).
        """
        answer = await super().score(segment, tokens, version, start)
        self._answered_tokens += answer.scores.shape[1]
        return answer

    def describe(self) -> list[str]:
        return [str(self.account()), *(f"tasks: {line}" for line in waits())]

    def activity(self) -> Activity:
        """Return what the server did, and for how long, since the last call."""
        spans = self.lane.take()
        return Activity(time.monotonic(), self._life, spans)

    def account(self) -> dict[str, Any]:
        return {
            **asdict(self.counts),
            "answered_tokens": self._answered_tokens,
            "version": self.live,
            "waiting": self.waiting,
        }


def _end_process(_: BaseException) -> None:
    os._exit(1)

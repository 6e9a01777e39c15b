# SPDX-License-Identifier: Apache-2.0
"""A log-prob server, as a Ray actor: the service, and the ranks that compute for it.

Contract: a batch is dealt to the data-parallel shares of the engine, rows of equal number and tokens about equal; every
rank of a share gets the same rows. A rank that dies or does not answer ends the server, whose process ends with it, so
that callers go elsewhere. Shown by tests/integration/test_model_engine_server.py.
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
    """Rows of a batch for each share, equally many each: a row may occur more than once to make up the number.

    The longest rows first, to and fro over the shares.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    order += [order[-1]] * (-len(order) % shares)
    dealt: list[list[int]] = [[] for _ in range(shares)]
    for number, row in enumerate(order):
        turn, seat = divmod(number, shares)
        dealt[seat if turn % 2 == 0 else shares - 1 - seat].append(row)
    return dealt


class Ranks:
    """`recipe.async_engine.log_prob_servers.service.ScoringEngine` over the workers of one server."""

    def __init__(self, workers: Sequence[ray.actor.ActorHandle], timeout_s: float) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._places: list[Place] = []

    async def find_places(self) -> None:
        """Ask the workers once where they stand, before anything is scored."""
        self._places = await self._all([worker.place.remote() for worker in self._workers])

    async def score(self, sequences: Sequence[Segment]) -> list[np.ndarray]:
        """Log-probs and entropies of the tokens wanted, float32 (2, tokens) each."""
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
        # Every rank's outcome: when one dies, others may fail for it first, in what they computed together.
        try:
            async with asyncio.timeout(self._timeout_s):
                outcomes = await asyncio.gather(*answers, return_exceptions=True)
        except TimeoutError:
            raise EngineLost(f"the ranks did not answer within {self._timeout_s:g} s") from None
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if isinstance(error, RayActorError):
                raise EngineLost(f"a rank died: {error}") from error
        if errors:
            raise errors[0]
        return outcomes


class ModelEngineServer(ScoringService):
    """The service as an actor. What it is asked besides scores comes from the ranks and the publisher."""

    def __init__(
        self,
        settings: ScoringSettings,
        workers: Sequence[ray.actor.ActorHandle],
        timeout_s: float,
        live: int | None = None,
    ) -> None:
        """``live``: the version of the weights that the workers have from the start; None: they wait for some."""
        self._ranks = Ranks(workers, timeout_s)
        super().__init__(settings, self._ranks, _end_process, live=live, ranks=len(workers))
        self._answered_tokens = 0
        self._life = uuid4().hex

    async def start(self) -> None:
        """Begin to serve."""
        await self._ranks.find_places()
        self.run()

    async def score(self, segment: Segment, tokens: int, version: int, start: int) -> Answer:
        """As the service's; scores are float32 (2, tokens wanted): log-probs and entropies."""
        answer = await super().score(segment, tokens, version, start)
        self._answered_tokens += answer.scores.shape[1]
        return answer

    def describe(self) -> list[str]:
        """Lines: its account, and where the coroutines wait."""
        return [str(self.account()), *(f"tasks: {line}" for line in waits())]

    def activity(self) -> Activity:
        """What it did since this was asked last."""
        spans = self.lane.take()
        return Activity(time.monotonic(), self._life, spans)

    def account(self) -> dict[str, Any]:
        """Counts of the server's life so far, its live version and how many requests wait."""
        return {
            **asdict(self.counts),
            "answered_tokens": self._answered_tokens,
            "version": self.live,
            "waiting": self.waiting,
        }


def _end_process(_: BaseException) -> None:
    os._exit(1)

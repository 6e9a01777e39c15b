# SPDX-License-Identifier: Apache-2.0
"""Fits the time of an engine's steps to what its places did and the tokens that they sampled meanwhile.

Contract: a step takes ``base_s``, and more for each request in a place, for each token that these requests have, and
for each token that is read for requests that join at the step. If the lengths of prompts are not known, that part is
for each request that joins. No part is negative, and a part that explains no more than chance would is 0. A stretch of
the record has its tokens and the number of requests in places, which give the number of its steps. The answers tell how
many tokens the requests had: each had its last token at its end, and one fewer a step before. Stretches with validation
or retries are left out, since the record does not tell their first tokens from others. Shown by
tests/plan/test_engine_steps.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from recipe.async_engine.record.events import ROLLOUT, Class, Event

_FIRST = (Class.PREFILL, Class.RE_PREFILL)
_USED = (*_FIRST, Class.DECODING)
_KNOWN = (*_USED, Class.IDLE_PLACES)

VARIES = 0.25
"""How much of its mean a quantity has to vary by, so that its cost can be told."""
_SMALLEST = 1e-300  # An error of 0 would have no logarithm.


@dataclass(frozen=True)
class EngineSteps:
    """The parts of a step's time, in seconds."""

    base_s: float
    request_s: float
    token_s: float
    read_token_s: float = 0.0
    join_s: float = 0.0

    def read_s(self, tokens: int) -> float:
        """Return what a request that joins with so many tokens adds to a step."""
        return self.join_s + self.read_token_s * tokens

    def step_s(self, batch: int, context: int) -> float:
        return self.base_s + self.request_s * batch + self.token_s * context


def fit_steps(
    events: Iterable[Event], answers: Sequence[tuple[int, float]], places: float, replicas: int, prompt: float = 0.0
) -> EngineSteps | None:
    """Fit by least squares over all stretches of all engines; return None if no stretch can be used.

    Args:
        events: the record's events.
        answers: for each answer its tokens and when it ended.
        places: the places of one engine.
        replicas: the engines, which share the answers evenly.
        prompt: the tokens of a prompt; 0 if not known.
    """
    stretches: defaultdict[tuple[str, float, float], list[Event]] = defaultdict(list)
    for event in events:
        if event.lane.startswith(ROLLOUT):
            stretches[event.lane, event.start, event.end].append(event)
    rows, middles = [], []
    for (_, start, end), parts in stretches.items():
        tokens = sum(part.tokens or 0 for part in parts)
        batch = places * sum(part.share for part in parts if part.what in _USED)
        if tokens and batch > 0 and all(part.what in _KNOWN for part in parts):
            new, again = (sum(part.tokens or 0 for part in parts if part.what == what) for what in _FIRST)
            # A request that finds a free place waits in it for the next step, half a step on average.
            finds = new + again if any(part.what == Class.IDLE_PLACES for part in parts) else 0
            steps = (tokens + finds / 2) / batch
            rows.append((batch, (new + again) / steps, again / steps, (end - start) / steps, steps))
            middles.append((start + end) / 2)
    if not rows:
        return None
    batches, joined, again, took, weight = np.array(rows).T
    answered = np.array([*_contexts(answers, middles, np.average(took, weights=weight))]) / replicas
    # Requests that come again have as many tokens as the others, on average.
    read = prompt * joined + again * answered / batches if prompt else joined
    table = np.column_stack((np.ones(len(took)), batches, answered + prompt * batches, read))
    known = [column for column in (1, 2, 3) if _varies(table[:, column], weight)]
    fits = [
        _least_squares(table, took, weight, [0, *others]) for count in range(4) for others in combinations(known, count)
    ]
    _, (base, of_request, of_token, of_read) = min((fit for fit in fits if min(fit[1]) >= 0), key=lambda fit: fit[0])
    reading = {"read_token_s" if prompt else "join_s": of_read}
    return EngineSteps(base, of_request, of_token, **reading)


def _contexts(answers: Sequence[tuple[int, float]], moments: Sequence[float], step_s: float) -> Iterator[float]:
    """Yield, for each moment, the tokens that all answers under way have, if a token takes ``step_s``."""
    tokens, ended = (np.array(column, float) for column in zip(*answers, strict=True))
    for moment in moments:
        had = tokens - (ended - moment) / step_s
        yield float(had[(ended > moment) & (had > 0)].sum())


def _varies(values: np.ndarray, weight: np.ndarray) -> bool:
    """Return whether a quantity varies enough to tell what it costs."""
    mean = np.average(values, weights=weight)
    return bool(mean > 0 and math.sqrt(np.average((values - mean) ** 2, weights=weight)) > VARIES * mean)


def _least_squares(
    table: np.ndarray, took: np.ndarray, weight: np.ndarray, columns: list[int]
) -> tuple[float, list[float]]:
    """Fit only the parts of these columns; return the fit's criterion and the parts."""
    parts = np.zeros(table.shape[1])
    parts[columns] = np.linalg.lstsq(table[:, columns] * weight[:, None], took * weight, rcond=None)[0]
    error = float((((table @ parts - took) * weight) ** 2).mean())
    # Bayesian information criterion (Schwarz 1978): a part has to explain more than chance would.
    criterion = len(took) * math.log(error + _SMALLEST) + len(columns) * math.log(len(took))
    return criterion, [float(part) for part in parts]

# SPDX-License-Identifier: Apache-2.0
"""The time of an engine's steps, fitted from what its places did and the tokens that they sampled meanwhile.

Contract: a step takes ``base_s``, and more for each request in a place, for each token that these have so far and for
each token that is read for those which join at it, or where prompts' lengths are not known for each that joins. No part
is negative, and one that explains no more than chance would is none. A stretch of the record knows its tokens and how
many requests were in places, so how many steps it had. What they have is told by the answers: each had its last token
at its end, and one fewer a step before. Where a stretch had validation or retries it is left out: their first tokens
are not told apart.
Shown by tests/plan/test_engine_steps.py.
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
"""By so much of its mean, or nothing is told of a part."""
_SMALLEST = 1e-300  # an error of nothing has no logarithm


@dataclass(frozen=True)
class EngineSteps:
    """See the module's contract; in seconds."""

    base_s: float
    request_s: float
    token_s: float
    read_token_s: float = 0.0
    join_s: float = 0.0

    def read_s(self, tokens: int) -> float:
        """Of a request that joins with so many tokens."""
        return self.join_s + self.read_token_s * tokens

    def step_s(self, batch: int, context: int) -> float:
        return self.base_s + self.request_s * batch + self.token_s * context


def fit_steps(
    events: Iterable[Event], answers: Sequence[tuple[int, float]], places: float, replicas: int, prompt: float = 0.0
) -> EngineSteps | None:
    """Least squares over all stretches of all engines; None if no stretch can be used.

    answers: (tokens, when it ended). places: of one engine. replicas: engines that share the answers evenly. prompt:
    tokens of a prompt; 0 if not known.
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
            # A request that finds a free place is in it before the next step begins, half a step on average.
            finds = new + again if any(part.what == Class.IDLE_PLACES for part in parts) else 0
            steps = (tokens + finds / 2) / batch
            rows.append((batch, (new + again) / steps, again / steps, (end - start) / steps, steps))
            middles.append((start + end) / 2)
    if not rows:
        return None
    batches, joined, again, took, weight = np.array(rows).T
    answered = np.array([*_contexts(answers, middles, np.average(took, weights=weight))]) / replicas
    # Those that come again have as many tokens as the others.
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
    """Tokens that the answers under way have in all, at each of these moments, if a token takes so long."""
    tokens, ended = (np.array(column, float) for column in zip(*answers, strict=True))
    for moment in moments:
        had = tokens - (ended - moment) / step_s
        yield float(had[(ended > moment) & (had > 0)].sum())


def _varies(values: np.ndarray, weight: np.ndarray) -> bool:
    """Whether there is enough of it, and not always as much, to tell what it costs."""
    mean = np.average(values, weights=weight)
    return bool(mean > 0 and math.sqrt(np.average((values - mean) ** 2, weights=weight)) > VARIES * mean)


def _least_squares(
    table: np.ndarray, took: np.ndarray, weight: np.ndarray, columns: list[int]
) -> tuple[float, list[float]]:
    """(criterion, parts) of a fit with these parts alone; the time of a stretch is known to a step."""
    parts = np.zeros(table.shape[1])
    parts[columns] = np.linalg.lstsq(table[:, columns] * weight[:, None], took * weight, rcond=None)[0]
    error = float((((table @ parts - took) * weight) ** 2).mean())
    # Bayesian information criterion (Schwarz 1978): a part has to explain more than chance would.
    criterion = len(took) * math.log(error + _SMALLEST) + len(columns) * math.log(len(took))
    return criterion, [float(part) for part in parts]

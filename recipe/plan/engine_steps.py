# SPDX-License-Identifier: Apache-2.0
"""Fits a linear model of the duration of a rollout engine's decode steps to the event record of a run.

Contract: the duration of a step is the sum of a constant; a term per running request; a term per token of context of
these requests; and a term per token that is prefilled for requests that join at the step (or, if the lengths of prompts
are not known, a term per joining request). No term is negative. A term that explains no more than chance would is 0.

The event record has, for each of many intervals, the number of sampled tokens and the share of sequence slots
(``places``) in each class, such as decoding. The number of steps of an interval follows from these; the context at each
time follows from the lengths and end times of the answers. Intervals with validation or retries are left out, because
the record does not say which of their tokens came from a prefill. Shown by tests/plan/test_engine_steps.py.
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
"""The coefficient of a quantity is fitted only if its standard deviation is above this share of its mean."""
_SMALLEST = 1e-300  # Added to an error before taking its logarithm, because 0 has no logarithm.


@dataclass(frozen=True)
class EngineSteps:
    """The linear model of a decode step's duration.

    Attributes:
        base_s: constant, in seconds.
        request_s: seconds per running request.
        token_s: seconds per token of context.
        read_token_s: seconds per prefilled token.
        join_s: seconds per request that joins.
    """

    base_s: float
    request_s: float
    token_s: float
    read_token_s: float = 0.0
    join_s: float = 0.0

    def read_s(self, tokens: int) -> float:
        """Return the seconds that a request with ``tokens`` tokens adds to the step at which it joins."""
        return self.join_s + self.read_token_s * tokens

    def step_s(self, batch: int, context: int) -> float:
        return self.base_s + self.request_s * batch + self.token_s * context


def fit_steps(
    events: Iterable[Event], answers: Sequence[tuple[int, float]], places: float, replicas: int, prompt: float = 0.0
) -> EngineSteps | None:
    """Fit the model to a run by least squares; return None if the event record has no usable interval.

    Args:
        answers: (number of tokens, end time) of each answer.
        places: number of sequence slots of one engine.
        replicas: number of engines, which are assumed to share the answers evenly.
        prompt: mean number of tokens of a prompt; 0 if not known.
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
            # A new request takes a free slot at once, but is decoded only from the next step on. So it occupies the
            # slot for half a step more on average.
            finds = new + again if any(part.what == Class.IDLE_PLACES for part in parts) else 0
            steps = (tokens + finds / 2) / batch
            rows.append((batch, (new + again) / steps, again / steps, (end - start) / steps, steps))
            middles.append((start + end) / 2)
    if not rows:
        return None
    batches, joined, again, took, weight = np.array(rows).T
    answered = np.array([*_contexts(answers, middles, np.average(took, weights=weight))]) / replicas
    # If interrupted requests join again, assume that they have as many tokens as the running requests have on average.
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
    """Yield, for each time in ``moments``, how many tokens all unfinished answers together had then.

    Args:
        answers: (number of tokens, end time) of each answer.
        moments: times in seconds.
        step_s: seconds that an answer takes for each token.
    """
    tokens, ended = (np.array(column, float) for column in zip(*answers, strict=True))
    for moment in moments:
        had = tokens - (ended - moment) / step_s
        yield float(had[(ended > moment) & (had > 0)].sum())


def _varies(values: np.ndarray, weight: np.ndarray) -> bool:
    """Return whether a quantity varies enough for its coefficient to be fitted."""
    mean = np.average(values, weights=weight)
    return bool(mean > 0 and math.sqrt(np.average((values - mean) ** 2, weights=weight)) > VARIES * mean)


def _least_squares(
    table: np.ndarray, took: np.ndarray, weight: np.ndarray, columns: list[int]
) -> tuple[float, list[float]]:
    """Fit durations to columns of a table; return the fit's criterion (smaller is better) and all coefficients.

    Args:
        table: one row per interval, with one column per coefficient.
        took: seconds of a step in each interval.
        weight: weight of each interval.
        columns: the columns to fit; the coefficients of all others are 0.
    """
    parts = np.zeros(table.shape[1])
    parts[columns] = np.linalg.lstsq(table[:, columns] * weight[:, None], took * weight, rcond=None)[0]
    error = float((((table @ parts - took) * weight) ** 2).mean())
    # By the Bayesian information criterion (Schwarz 1978), a coefficient has to explain more than chance would.
    criterion = len(took) * math.log(error + _SMALLEST) + len(columns) * math.log(len(took))
    return criterion, [float(part) for part in parts]

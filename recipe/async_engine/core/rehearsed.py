# SPDX-License-Identifier: Apache-2.0
"""Results of a rehearsal (a short trial of weight transfer, generation and log-probs before training).

Contract: results are plain values, which are passed unchanged to ``summary.json`` and to trackers. Shown by
tests/core/test_rehearsed.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

PASSED, FELL_BACK, FAILED, LEFT_OUT = "passed", "fell back", "failed", "left out"

SHARES = {"float32": 0.02, "float16": 0.1}
"""The allowed difference between two computations of log-probs, for each dtype of the engine. It is a share of the
log-probs' spread (their mean absolute deviation).
"""
USUAL_SHARE = 0.25
"""The share (see `SHARES`) for all dtypes that are not keys of `SHARES`: bfloat16 and narrower ones."""
LEAST_SPREAD = 0.2
"""Least spread of log-probs, in nats, from which the allowed difference is computed; it replaces smaller spreads."""


@dataclass(frozen=True)
class Agreement:
    """Mean absolute difference between two computations of the same log-probs, and the largest allowed one, in nats."""

    difference: float
    allowed: float
    tokens: int

    @property
    def holds(self) -> bool:
        """Return whether the difference is allowed. A difference of NaN is never allowed."""
        return self.difference <= self.allowed

    def __str__(self) -> str:
        return f"by {self.difference:.2g} on average over {self.tokens} tokens, at most {self.allowed:.2g} is allowed"


def agreement(pairs: Sequence[tuple[float, float]], dtype: str) -> Agreement:
    """Compare two computations of the log-probs of some tokens.

    Rounding changes a log-prob by a small share of the spread of log-probs (their mean absolute deviation), whereas
    wrong weights change it by about the spread itself. So the limit is a share of the second computation's spread.

    Args:
        pairs: the two log-probs of each token, in nats.
        dtype: verl's name of the dtype in which the engine computed the first log-prob of each pair.
    """
    if not pairs:
        return Agreement(0.0, 0.0, 0)
    middle = fmean(second for _, second in pairs)
    spread = fmean(abs(second - middle) for _, second in pairs)
    difference = fmean(abs(first - second) for first, second in pairs)
    share = SHARES.get(dtype.removeprefix("torch."), USUAL_SHARE)
    return Agreement(difference, share * max(spread, LEAST_SPREAD), len(pairs))


@dataclass
class Check:
    """One check of a rehearsal: its outcome (such as `PASSED`), an explanation, and its duration in seconds."""

    name: str
    outcome: str = PASSED
    said: str = ""
    seconds: float = 0.0


@dataclass
class Rehearsed:
    """All checks of a rehearsal, in order.

    ``fallbacks``: settings ("name=value") with which the run continues, because a check failed with the configured
    values. ``passes``: number of forward and backward passes that each trainer rank made during weight transfers.
    ``difference``: the largest `Agreement.difference` of any replica, in nats.
    """

    checks: list[Check] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    passes: int = 0
    difference: float = 0.0
    seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        return any(check.outcome == FAILED for check in self.checks)

    def summary(self) -> dict[str, Any]:
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        return {
            "rehearsal/seconds": self.seconds,
            "rehearsal/fallbacks": len(self.fallbacks),
            "rehearsal/log_prob_difference": self.difference,
            "rehearsal/training_passes_beside": self.passes,
        }


def table(summary: dict[str, Any]) -> list[str]:
    """Return the results of a rehearsal as lines of text. ``summary`` is the result of `Rehearsed.summary`."""
    width = max((len(check["name"]) for check in summary["checks"]), default=0)
    lines = [
        f"  {check['name']:<{width}}  {check['outcome']:<9}  {check['seconds']:6.1f} s  {check['said']}".rstrip()
        for check in summary["checks"]
    ]
    head = f"rehearsal, {summary['seconds']:.1f} s"
    if summary["fallbacks"]:
        head += f"; the run goes on with {', '.join(summary['fallbacks'])}: set this to skip the failed attempt"
    return [head, *lines]

# SPDX-License-Identifier: Apache-2.0
"""What the rehearsal of a run has found, and the rule by which two computations of log-probs agree.

Contract: plain values only, which travel as they are into ``summary.json`` and to trackers. Shown by
tests/core/test_rehearsed.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

PASSED, FELL_BACK, FAILED, LEFT_OUT = "passed", "fell back", "failed", "left out"

SHARES = {"float32": 0.02, "float16": 0.1}
"""By the engine's dtype: how far log-probs may be apart, as a share of their spread."""
USUAL_SHARE = 0.25
"""For bfloat16 and anything narrower."""
LEAST_SPREAD = 0.2
"""In nats: log-probs that are nearly all alike are judged as if they were spread so much."""


@dataclass(frozen=True)
class Agreement:
    """Two computations of the same log-probs, in nats: their mean absolute difference, and how large it may be."""

    difference: float
    allowed: float
    tokens: int

    @property
    def holds(self) -> bool:
        """Whether they agree; NaN agrees with nothing."""
        return self.difference <= self.allowed

    def __str__(self) -> str:
        return f"by {self.difference:.2g} on average over {self.tokens} tokens, at most {self.allowed:.2g} is allowed"


def agreement(pairs: Sequence[tuple[float, float]], dtype: str) -> Agreement:
    """Compare the log-probs of each token, computed twice.

    Rounding moves a log-prob by a small share of how far log-probs are spread at all; other weights move it by about
    the spread itself. So the spread of the second computation is the measure.

    Args:
        pairs: of one token each, in nats.
        dtype: in which the engine computed the first of each, as verl names it.
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
    """One thing that was tried: how it went, what there is to say of it, and how long it took."""

    name: str
    outcome: str = PASSED
    said: str = ""
    seconds: float = 0.0


@dataclass
class Rehearsed:
    """All that was tried, in order.

    ``fallbacks``: settings, as they are written on a command line, that the run goes on with in place of its own.
    ``passes``: forward and backward passes of every trainer rank while weights travelled beside them.
    """

    checks: list[Check] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    passes: int = 0
    difference: float = 0.0
    seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether one of the checks has."""
        return any(check.outcome == FAILED for check in self.checks)

    def summary(self) -> dict[str, Any]:
        """For ``summary.json``."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """For trackers."""
        return {
            "rehearsal/seconds": self.seconds,
            "rehearsal/fallbacks": len(self.fallbacks),
            "rehearsal/log_prob_difference": self.difference,
            "rehearsal/training_passes_beside": self.passes,
        }


def table(summary: dict[str, Any]) -> list[str]:
    """Lines that show a rehearsal's `Rehearsed.summary` to a person."""
    width = max((len(check["name"]) for check in summary["checks"]), default=0)
    lines = [
        f"  {check['name']:<{width}}  {check['outcome']:<9}  {check['seconds']:6.1f} s  {check['said']}".rstrip()
        for check in summary["checks"]
    ]
    head = f"rehearsal, {summary['seconds']:.1f} s"
    if summary["fallbacks"]:
        head += f"; the run goes on with {', '.join(summary['fallbacks'])}: set it to have it without a try"
    return [head, *lines]

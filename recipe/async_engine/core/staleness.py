# SPDX-License-Identifier: Apache-2.0
"""Exact statistics of how stale the trained groups were.

A group's staleness is the version it is trained at minus the version of its oldest token. The histogram is exact and
has at most `max_staleness + 1` entries. Test: tests/core/test_ledger.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class StalenessStats:
    """Number of trained groups by staleness in versions."""

    def __init__(self, histogram: Iterable[tuple[int, int]] = ()) -> None:
        self._histogram: Counter[int] = Counter(dict(histogram))

    def record(self, staleness: int) -> None:
        """Count one trained group."""
        self._histogram[staleness] += 1

    @property
    def count(self) -> int:
        """Number of groups recorded."""
        return self._histogram.total()

    @property
    def sum(self) -> int:
        """Sum of their stalenesses."""
        return sum(staleness * groups for staleness, groups in self._histogram.items())

    @property
    def max(self) -> int:
        """Largest staleness, 0 if nothing was recorded."""
        return max(self._histogram, default=0)

    @property
    def mean(self) -> float:
        """Mean staleness, 0.0 if nothing was recorded."""
        return self.sum / self.count if self.count else 0.0

    def histogram(self) -> dict[int, int]:
        """Number of groups by staleness, ascending."""
        return dict(sorted(self._histogram.items()))

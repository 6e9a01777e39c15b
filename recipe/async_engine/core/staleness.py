# SPDX-License-Identifier: Apache-2.0
"""Exact statistics of how stale the trained groups were.

A group's staleness is the version it is trained at minus the version of its oldest token. The histogram is exact and
has at most `max_staleness + 1` entries. Test: tests/core/test_ledger.py.
"""

from collections import Counter


class StalenessStats(Counter[int]):
    """Number of trained groups by staleness in versions."""

    @property
    def sum(self) -> int:
        """Sum of their stalenesses."""
        return sum(staleness * groups for staleness, groups in self.items())

    @property
    def max(self) -> int:
        """Largest staleness, 0 if nothing was recorded."""
        return max(self, default=0)

    @property
    def mean(self) -> float:
        """Mean staleness, 0.0 if nothing was recorded."""
        return self.sum / self.total() if self else 0.0

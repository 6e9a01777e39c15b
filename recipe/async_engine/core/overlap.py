# SPDX-License-Identifier: Apache-2.0
"""How much of the rewards' time cost nothing, because something else went on meanwhile.

Contract. Reward seconds are counted once for each trajectory that is being scored. They are exposed while nothing
generates and the trainer waits for a batch: then only rewards keep the run from going on. All others are hidden. The
clock is passed in; plain state, its caller holds the lock. Test: tests/core/test_overlap.py.
"""

from __future__ import annotations

from collections.abc import Callable


class RewardOverlap:
    """Reward seconds of a run, and the exposed ones among them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._scoring = 0
        self._generating = 0
        self._waiting = False
        self._seconds = self._exposed = 0.0

    def change(self, *, scoring: int = 0, generating: int = 0) -> None:
        """So many trajectories more, or fewer, are being scored or generate from now on."""
        self._advance()
        self._scoring += scoring
        self._generating += generating

    def wait(self, waiting: bool) -> None:
        """Whether the trainer waits for a batch from now on."""
        self._advance()
        self._waiting = waiting

    @property
    def scoring(self) -> int:
        """Trajectories that are being scored now."""
        return self._scoring

    @property
    def seconds(self) -> float:
        """Reward seconds so far."""
        self._advance()
        return self._seconds

    @property
    def hidden_share(self) -> float:
        """Share of the reward seconds that were hidden, 1.0 if there were none."""
        self._advance()
        return 1.0 - self._exposed / self._seconds if self._seconds else 1.0

    def _advance(self) -> None:
        now = self._clock()
        seconds = (now - self._since) * self._scoring
        self._since = now
        self._seconds += seconds
        if self._waiting and self._generating == 0:
            self._exposed += seconds

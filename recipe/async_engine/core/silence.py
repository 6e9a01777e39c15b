# SPDX-License-Identifier: Apache-2.0
"""How long something has been silent, counted in time in which this process could have heard it.

Contract: the seconds in which the listening process was itself stopped (SIGSTOP, a suspended machine) do not count,
since nothing could be heard then. Test: tests/core/test_silence.py.
"""

MOST_S = 5.0
"""A longer gap between two looks is the listener's own; only this much of it counts."""


class Silence:
    """Time since the last sign of life.

    Args:
        limit_s: how long silence may last.
        now: of a clock that never runs backwards, in seconds; as in `look`.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s = limit_s
        self.seconds = 0.0
        self._looked = now

    def heard(self) -> None:
        """A sign of life."""
        self.seconds = 0.0

    def look(self, now: float) -> bool:
        """Count the time since the last look; returns whether silence has lasted too long."""
        self.seconds += min(now - self._looked, MOST_S)
        self._looked = now
        return self.seconds > self.limit_s

# SPDX-License-Identifier: Apache-2.0
"""The time of another process in this one's, from questions that it answered with its clock.

Contract: the answer was made between the question and its arrival, so that each exchange bounds the difference of the
two clocks. Times are mapped without a gap and in their order: the clock of the other is followed from one exchange to
the next, and corrected only where it has left the bounds. With clocks of the same pace the error is at most the round
trip of the quickest exchange so far, whatever the difference of the two is; a pace that differs is followed.

Shown by tests/core/test_events.py.
"""

from typing import NamedTuple


class Exchange(NamedTuple):
    """A question, by this process's clock ``asked`` and ``came``; the other's clock when it answered."""

    asked: float
    answered: float
    came: float


class OtherClock:
    """See the module's contract."""

    def __init__(self, first: Exchange) -> None:
        self._theirs = self._theirs_before = first.answered
        self._here = self._here_before = (first.asked + first.came) / 2

    def note(self, exchange: Exchange) -> None:
        """Another exchange; from now on times are mapped up to it."""
        self._theirs_before, self._here_before = self._theirs, self._here
        guess = self._here + exchange.answered - self._theirs
        self._theirs = exchange.answered
        # Not before what has been mapped: no time is given twice.
        self._here = max(self._here_before, min(max(guess, exchange.asked), exchange.came))

    def here(self, theirs: float) -> float:
        """This process's time at the other's ``theirs``."""
        if theirs <= self._theirs_before:
            return self._here_before - (self._theirs_before - theirs)
        if theirs >= self._theirs:
            return self._here + theirs - self._theirs
        share = (theirs - self._theirs_before) / (self._theirs - self._theirs_before)
        return self._here_before + share * (self._here - self._here_before)

# SPDX-License-Identifier: Apache-2.0
"""How many trajectories may have a generation slot while some of these are at tools.

Contract: a slot's trajectory keeps an engine busy only while it waits for an answer. Where agent loops use tools there
are more slots than the engines need at once, in the ratio of the time that ended trajectories had in all to their time
at engines, and never more than `most`; without tools there are `least`, exactly. What ended longer ago counts for less.
The staleness gate is not asked here: it holds whatever the number of slots is. Shown by tests/core/test_slots.py.
"""

MEMORY = 4
"""Ended trajectories that count, in multiples of the slots without tools."""


class Slots:
    """See the module's contract.

    Attributes:
        count: of slots, now.
    """

    def __init__(self, least: int, most: int) -> None:
        self.count = self._least = least
        self._most = most
        self._at_engines_s = self._at_tools_s = 0.0

    def ended(self, at_engines_s: float, at_tools_s: float) -> int:
        """A trajectory has ended that waited for answers, and was at tools, for so many seconds; returns `count`."""
        kept = 1 - 1 / (MEMORY * self._least)
        self._at_engines_s = kept * self._at_engines_s + at_engines_s
        self._at_tools_s = kept * self._at_tools_s + at_tools_s
        if self._at_engines_s > 0:
            at_tools = self._least * self._at_tools_s / self._at_engines_s
            self.count = int(min(self._most, self._least + at_tools))
        return self.count

# SPDX-License-Identifier: Apache-2.0
"""The lending policy: when the trainer's accelerators generate, and when they are called back.

Hybrid replicas stand on the trainer's accelerators and are asleep while it trains; standalone replicas have
accelerators of their own. Contract:

- Accelerators are lent only while the trainer has no batch to train and trajectories wait for a place, and only where a
  switch is worth its time. They are called back only once a batch may be taken.
- They are called back when as many batches are ready as a switch is worth, or earlier if most hybrid places are empty
  and nothing waits: so a lender that asks on every change always gets its accelerators back.
- The policy decides about speed alone. What may start and what may be trained is for the staleness gate to say, so no
  answer given here can break its bound.

A switch is worth what it changes until the next batch: the batch is there earlier or later, and more groups have been
generated meanwhile, which shortens later waits. The policy works this out from measured averages: the seconds of a
switch, of a training step and of a group's rewards, and the place-seconds of a group, which are the seconds that its
trajectories spent in places of engines, added up. Let `n` groups be missing, `s` and `h` be the groups a second of
standalone and hybrid places, `w` and `z` the seconds to wake and to sleep, `r` those for rewards. A batch is there
after n / s + r without a switch, and after w + (n - s w) / (s + h) + r + z with one.

Plain state: no clock, no threads, no events. Tests: tests/core/test_lending.py, tests/plan/test_lending_simulation.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SWITCH_SHARE = 0.05
"""Batches are collected in one switch until it costs at most this share of a step."""

EMPTY_SHARE = 0.5
"""With more of the hybrid places empty than this, and nothing that waits, generation has run out of work."""

MEASURED = 2
"""Number of switches with which a run begins, whatever they cost: the first one of a run is slower than others."""

KEPT = 0.8
"""Weight of the past in a moving average: about the last five measurements count."""


class Average:
    """An exponential moving average; None before the first measurement."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, measured: float) -> None:
        """Take in one more measurement."""
        self.value = measured if self.value is None else KEPT * self.value + (1 - KEPT) * measured


@dataclass(frozen=True, slots=True)
class Places:
    """Places of the engines, and what there is for them to do.

    standalone, hybrid: places of all replicas of the kind that are alive, whether awake or asleep. waiting:
    trajectories that could begin or go on at once if they had a place, those of prompts that the gate admits included.
    hybrid_taken: hybrid places in which a trajectory generates.
    """

    standalone: int
    hybrid: int
    waiting: int
    hybrid_taken: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What the trainer needs next.

    batch_groups: b. ready: groups that are ready. sampled: groups that need no place any more, but wait for rewards.
    spent: place-seconds that the other running groups have had so far. may_take: whether a batch may be taken now.
    most_live: groups that may be live at once, as far as the gate admits them.
    """

    batch_groups: int
    ready: int
    sampled: int
    spent: float
    may_take: bool
    most_live: int


class PlaceMeter:
    """Measures the place-seconds of groups, the seconds that their trajectories spend in places of engines.

    If more trajectories run than the engines have places, each of them has a part of a place.

    Args:
        clock: a clock in seconds.
        places: number of places of all engines that are awake.
    """

    def __init__(self, clock: Callable[[], float], places: int) -> None:
        self._clock, self._places, self._running = clock, places, 0
        self._since = clock()
        # `_of_each` has the place-seconds of a trajectory that runs from the beginning; `_begun` is the sum of its
        # values at which the running trajectories began.
        self._of_each = self._begun = self._of_groups = 0.0
        self._of_group: dict[int, float] = {}

    def use(self, places: int) -> None:
        """Set how many places there are from now on."""
        self._advance()
        self._places = places

    def begin(self) -> float:
        """Count one more running trajectory; return a value to pass to :meth:`leave`."""
        self._advance()
        self._running += 1
        self._begun += self._of_each
        return self._of_each

    def leave(self, began: float, group: int | None) -> None:
        """Count one running trajectory less, and add its place-seconds to its group, if that has not ended."""
        self._advance()
        self._running -= 1
        self._begun -= began
        if group is not None:
            spent = self._of_each - began
            self._of_group[group] = self._of_group.get(group, 0.0) + spent
            self._of_groups += spent

    def end(self, group: int) -> float:
        """Forget a group that has ended, and return its place-seconds."""
        spent = self._of_group.pop(group, 0.0)
        self._of_groups -= spent
        return spent

    @property
    def spent(self) -> float:
        """Place-seconds of all trajectories that run and of all groups that have not ended."""
        self._advance()
        return max(0.0, self._of_groups + self._running * self._of_each - self._begun)

    def _advance(self) -> None:
        now = self._clock()
        seconds, self._since = now - self._since, now
        if self._running:
            self._of_each += seconds * min(1.0, self._places / self._running)


class LendingPolicy:
    """The policy with what it has measured; see the module's contract."""

    def __init__(self) -> None:
        self._wakes = 0
        self.wake_s, self.sleep_s = Average(), Average()
        self.train_s, self.reward_s = Average(), Average()
        self.group_place_s = Average()

    def lends(self, places: Places, demand: Demand) -> bool:
        """Return whether hybrid replicas should be woken now, while the trainer waits."""
        hybrid = min(places.hybrid, places.waiting)
        if demand.may_take or hybrid == 0:
            return False
        if places.standalone == 0 or self.group_place_s.value is None or self._wakes < MEASURED:
            # Nothing else generates, or too little is known yet: a switch measures it.
            return True
        return self._gain_s(self._in_groups(places.standalone), self._in_groups(hybrid), self._missing(demand)) > 0

    def woke(self, seconds: float) -> None:
        """Take in how long a wake-up took. The first one of a run is slower than others, and only counts until then."""
        if self._wakes == 1:
            self.wake_s = Average()
        self._wakes += 1
        self.wake_s.add(seconds)

    def calls_back(self, places: Places, demand: Demand) -> bool:
        """Return whether the hybrid replicas should go back to sleep now, so that the trainer trains."""
        if not demand.may_take:
            return False
        if places.waiting == 0 and places.hybrid_taken < (1 - EMPTY_SHARE) * places.hybrid:
            return True
        return demand.ready >= self.batches(places, demand) * demand.batch_groups

    def batches(self, places: Places, demand: Demand) -> int:
        """Return how many batches one switch should collect, at least 1 and at most what the gate lets be ready."""
        switch = (self.wake_s.value or 0.0) + (self.sleep_s.value or 0.0)
        # One batch less than may be live: with all of them ready, nothing could generate beside them.
        most = max(1, demand.most_live // demand.batch_groups - 1)
        if switch == 0.0 or self.group_place_s.value is None or self.train_s.value is None:
            return 1
        alone, every = self._in_groups(places.standalone), self._in_groups(places.standalone + places.hybrid)
        if every == 0.0:
            return 1
        train = self.train_s.value
        step = train + max(0.0, demand.batch_groups - alone * train) / every
        lost = switch * (1 - alone / every)
        return min(most, max(1, math.ceil(lost / (SWITCH_SHARE * step)))) if step > 0 else 1

    def _in_groups(self, places: float) -> float:
        """Return the groups a second that so many places generate, or the groups of so many place-seconds."""
        assert self.group_place_s.value is not None
        return places / max(self.group_place_s.value, 1e-9)

    def _missing(self, demand: Demand) -> float:
        """Return how many groups, or parts of them, are still to be generated for the next batch."""
        missing = max(0.0, demand.batch_groups - demand.ready - demand.sampled)
        begun = self._in_groups(demand.spent)
        # Some of what runs belongs to later batches, so at most half of what is missing counts as generated.
        return missing - min(begun, missing / 2)

    def _gain_s(self, alone: float, lent: float, missing: float) -> float:
        """Return the seconds that a switch saves; ``alone`` and ``lent`` are groups a second."""
        wake, sleep = self.wake_s.value or 0.0, self.sleep_s.value or 0.0
        # Where all groups are generated already, their rewards are half done on average.
        rewards = (self.reward_s.value or 0.0) / (1 if missing else 2)
        without = missing / alone + rewards
        awake = max(0.0, missing - alone * wake) / (alone + lent) + max(0.0, rewards - (0.0 if missing else wake))
        with_switch = wake + awake + sleep
        more_groups = alone * (with_switch - without) + lent * awake
        return without - with_switch + more_groups / (alone + lent)

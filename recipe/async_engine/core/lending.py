# SPDX-License-Identifier: Apache-2.0
"""Decides when the waiting trainer's accelerators are lent to generation, and when the trainer gets them back.

Hybrid rollout replicas run on the trainer's accelerators and sleep while it trains; standalone replicas have
accelerators of their own. A *place* is a sequence slot of an engine (`max_num_seqs`). A *switch* is one loan: hybrid
replicas wake, generate, and sleep again. Contract:

- A loan begins only while the trainer has no batch to train and trajectories wait for a place, and only if the switch
  is expected to save time.
- A loan ends only when a batch is ready: once enough batches are ready to make up for the cost of the switch, or
  earlier if most hybrid places are empty and no trajectory waits.
- These decisions affect only the speed. The staleness gate decides what may start and be trained, as without lending.

The saving is predicted from averages over the run so far: the seconds of waking, of going to sleep, of a training step
and of a group's rewards, and a group's *place-seconds*, the total time that its trajectories occupied places. If `n`
groups are missing for a batch, `s` and `h` are the groups per second that standalone and hybrid places generate, `w`
and `z` the seconds to wake and to sleep, and `r` the seconds for rewards, then the batch is ready after n / s + r
without a switch, and after w + (n - s w) / (s + h) + r + z with one. A switch also generates groups of later batches;
the time that these would have taken later counts as saved, too. Tests: tests/core/test_lending.py,
tests/plan/test_lending_simulation.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from recipe.async_engine.core.prompt_manager import PromptManager

SWITCH_SHARE = 0.05
"""A loan normally lasts until `n` batches are ready, where `n` is the smallest number for which the time lost by waking
and going to sleep, divided by `n`, is at most this share of a step's time.
"""

EMPTY_SHARE = 0.5
"""If no trajectory waits and more than this share of the hybrid replicas' sequence slots is empty, a loan ends early.
"""

MEASURED = 2
"""Number of switches (loans) at the beginning of a run that are made whatever they cost, to measure their cost."""

KEPT = 0.8
"""Weight of the old average when a new measurement is added to it, so that about the last five measurements count."""


class Average:
    """An exponential moving average; `value` is None before the first measurement."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, measured: float) -> None:
        self.value = measured if self.value is None else KEPT * self.value + (1 - KEPT) * measured


@dataclass(frozen=True, slots=True)
class Places:
    """The sequence slots (places) of the engines, and the trajectories that wait for them.

    standalone, hybrid: number of places of all live standalone and of all live hybrid replicas, awake or asleep.
    waiting: number of trajectories that lack only a place to generate, including trajectories of new prompts that the
    staleness gate would admit. hybrid_taken: number of hybrid places in which a trajectory generates.
    """

    standalone: int
    hybrid: int
    waiting: int
    hybrid_taken: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """The prompt groups that the trainer needs next, and how far they are generated.

    batch_groups: number of groups in a batch. ready: number of groups that are ready to be trained. sampled: number of
    groups that are generated and wait for rewards. spent: place-seconds that groups which are still being generated
    have used so far (see `PlaceMeter`). may_take: whether a batch may be taken now. most_live: number of groups that
    the staleness gate allows to be running or ready.
    """

    batch_groups: int
    ready: int
    sampled: int
    spent: float
    may_take: bool
    most_live: int


def look(
    manager: PromptManager, spent: float, standalone: int, hybrid: int, is_awake: bool, prompts_left: bool = True
) -> tuple[Places, Demand]:
    """Return the `Places` and the `Demand` by which a `LendingPolicy` decides.

    spent: place-seconds of groups that are still being generated (`PlaceMeter.spent`). standalone, hybrid: number of
    places of all live replicas of each kind. is_awake: whether the hybrid replicas generate, so that the manager's
    slots include theirs. prompts_left: whether the data has a further prompt. Trajectories are assumed to be spread
    evenly over the places.
    """
    ledger, running = manager.ledger, manager.running
    counts = ledger.counts()
    new = max(0, ledger.most_live - counts.live) if ledger.can_issue() and prompts_left else 0
    waiting = manager.pending + new * manager.group_size - (manager.slots - running)
    places = standalone + hybrid
    taken = min(running, places) * hybrid // places if is_awake and places else 0
    sampled, batch = manager.counts().sampled, ledger.settings.batch_groups
    demand = Demand(batch, counts.ready, sampled, spent, ledger.may_take(), ledger.most_live)
    return Places(standalone, hybrid, max(0, waiting), taken), demand


class PlaceMeter:
    """Measures place-seconds: how long the trajectories of each group occupy sequence slots (places) of engines.

    If more trajectories run than there are places, each of them counts as occupying an equal part of a place.

    Args:
        clock: returns the time in seconds.
        places: number of places of all engines that are awake.
    """

    def __init__(self, clock: Callable[[], float], places: int) -> None:
        self._clock, self._places, self._running = clock, places, 0
        self._since = clock()
        # `_of_each`: the place-seconds that a trajectory would have if it had run since the meter was created.
        # `_begun`: the sum, over the running trajectories, of the values that `_of_each` had when they began.
        # `_of_groups`: the sum of the values of `_of_group`, except those of the groups in `_sampled`.
        self._of_each = self._begun = self._of_groups = 0.0
        self._of_group: dict[int, float] = {}
        self._sampled: set[int] = set()

    def use(self, places: int) -> None:
        """Set the number of sequence slots (places) that all awake engines have together from now on."""
        self._advance()
        self._places = places

    def begin(self) -> float:
        """Record that a trajectory begins to run; return a value to pass to :meth:`leave` when it ends."""
        self._advance()
        self._running += 1
        self._begun += self._of_each
        return self._of_each

    def leave(self, began: float, group: int | None) -> None:
        """Record that a trajectory no longer runs, and add its place-seconds to ``group``, unless that is None.

        ``began`` is what :meth:`begin` returned for the trajectory.
        """
        self._advance()
        self._running -= 1
        self._begun -= began
        if group is not None:
            spent = self.end(group) + self._of_each - began
            self._of_group[group] = spent
            self._of_groups += spent

    def sampled(self, group: int) -> None:
        """Do not count ``group`` in :attr:`spent` from now on, because it is generated and only waits for rewards."""
        self._of_group[group] = self.end(group)
        self._sampled.add(group)

    def end(self, group: int) -> float:
        """Return the place-seconds of a group that has ended, and remove the group."""
        spent = self._of_group.pop(group, 0.0)
        if group not in self._sampled:
            self._of_groups -= spent
        self._sampled.discard(group)
        return spent

    @property
    def spent(self) -> float:
        """Place-seconds used so far by the groups that are still being generated.

        Their running trajectories count, and so do those that no longer run.
        """
        self._advance()
        return max(0.0, self._of_groups + self._running * self._of_each - self._begun)

    def _advance(self) -> None:
        now = self._clock()
        seconds, self._since = now - self._since, now
        if self._running:
            self._of_each += seconds * min(1.0, self._places / self._running)


class LendingPolicy:
    """Decides when to lend the trainer's accelerators and when to end a loan, from averages over the run so far."""

    def __init__(self) -> None:
        self._wakes = 0
        self.wake_s, self.sleep_s = Average(), Average()
        self.train_s, self.reward_s = Average(), Average()
        self.group_place_s = Average()

    def lends(self, places: Places, demand: Demand) -> bool:
        """Return whether to wake the hybrid replicas now; call this while the trainer waits for a batch."""
        hybrid = min(places.hybrid, places.waiting)
        if demand.may_take or hybrid == 0:
            return False
        if places.standalone == 0 or self.group_place_s.value is None or self._wakes < MEASURED:
            # Lend without predicting the gain: no other replica generates, or the averages that the prediction needs
            # are still to be measured.
            return True
        return self._gain_s(self._in_groups(places.standalone), self._in_groups(hybrid), self._missing(demand)) > 0

    def woke(self, seconds: float) -> None:
        """Record how long the hybrid replicas took to wake. The first time is unusually long; the next replaces it."""
        if self._wakes == 1:
            self.wake_s = Average()
        self._wakes += 1
        self.wake_s.add(seconds)

    def calls_back(self, places: Places, demand: Demand) -> bool:
        """Return whether the hybrid replicas should sleep now, so that the trainer can train."""
        if not demand.may_take:
            return False
        if places.waiting == 0 and places.hybrid_taken < (1 - EMPTY_SHARE) * places.hybrid:
            return True
        return demand.ready >= self.batches(places, demand) * demand.batch_groups

    def batches(self, places: Places, demand: Demand) -> int:
        """Return how many batches should be ready before a loan ends: at least 1, and not more than the gate allows."""
        switch = (self.wake_s.value or 0.0) + (self.sleep_s.value or 0.0)
        # Leave one batch of live groups for generation: if all live groups were ready, no engine would have work.
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
        """Return ``places`` divided by the mean place-seconds of a group.

        This converts a number of places to groups per second, and a number of place-seconds to groups.
        """
        assert self.group_place_s.value is not None
        return places / max(self.group_place_s.value, 1e-9)

    def _missing(self, demand: Demand) -> float:
        """Return how many groups are still to be generated for the next batch. Groups that have begun count in part."""
        missing = max(0.0, demand.batch_groups - demand.ready - demand.sampled)
        begun = self._in_groups(demand.spent)
        # `begun` includes work on groups of later batches, so at most half of the missing groups are subtracted.
        return missing - min(begun, missing / 2)

    def _gain_s(self, alone: float, lent: float, missing: float) -> float:
        """Return the seconds that a switch saves; negative if the switch costs more time than it saves.

        alone, lent: groups per second of standalone and of hybrid replicas. missing: groups still to be generated.
        """
        wake, sleep = self.wake_s.value or 0.0, self.sleep_s.value or 0.0
        # If all groups of the batch are generated, half of the time for their rewards has passed on average.
        rewards = (self.reward_s.value or 0.0) / (1 if missing else 2)
        without = missing / alone + rewards
        awake = max(0.0, missing - alone * wake) / (alone + lent) + max(0.0, rewards - (0.0 if missing else wake))
        with_switch = wake + awake + sleep
        more_groups = alone * (with_switch - without) + lent * awake
        return without - with_switch + more_groups / (alone + lent)

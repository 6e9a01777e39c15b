# SPDX-License-Identifier: Apache-2.0
"""Prompts, prompt groups with their states, and the counts that the sample ledger keeps about them.

A `Group` is immutable; the ledger replaces it at each change of its state:

    RUNNING -> READY -> TAKEN -> TRAINED      a new attempt leads from RUNNING or READY back to RUNNING;
    RUNNING or READY -> FILTERED or FAILED    resuming from a checkpoint leads from TAKEN back to READY

A run trains millions of prompts, so issued and trained prompts are stored as ranges of consecutive indices. Tests:
tests/core/test_ledger.py, tests/core/test_group_filter.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

UNIFORM_REASON = "uniform"
NON_FINITE_REASON = "non_finite"


@dataclass(frozen=True, slots=True)
class PromptRef:
    """One prompt of one epoch.

    index: number >= 0 of the prompt within its epoch: either its position in the sampler's order (with which
    `PromptSet` takes the least memory) or its row in the data set. epoch: number of earlier passes over the data set,
    >= 0. uid: name of the prompt's group in the trainer's batch.
    """

    index: int
    epoch: int
    uid: str

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.index


@dataclass(frozen=True)
class Prompt:
    """A prompt that has been read but not issued.

    ``row`` is its data row as a batch of one row, as verl collates it: ``row[name][0]`` is the value of a field.
    """

    epoch: int
    index: int
    row: dict[str, Any]

    @property
    def reference(self) -> PromptRef:
        return PromptRef(index=self.index, epoch=self.epoch, uid=f"{self.epoch}-{self.index}")


class PromptSet:
    """A compact set of prompts, given as (epoch, index), which stores ranges of consecutive indices.

    Per epoch it has one ascending list: first index of a range, end of that range (exclusive), first of the next, ...
    """

    def __init__(self, runs: Iterable[Sequence[int]] = ()) -> None:
        """Create a set with the ranges ``runs``, rows of [epoch, first, end] as from `to_rows`."""
        self._edges: dict[int, list[int]] = {}
        self._size = 0
        for epoch, first, end in runs:
            self._edges.setdefault(epoch, []).extend((first, end))
            self._size += end - first

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: tuple[int, int]) -> bool:
        epoch, index = key
        return bisect_right(self._edges.get(epoch, []), index) % 2 == 1

    def add(self, key: tuple[int, int]) -> bool:
        """Add the prompt (epoch, index); return False if the set already contained it."""
        if key in self:
            return False
        epoch, index = key
        edges = self._edges.setdefault(epoch, [])
        # Insert the index as a range of its own; where it touches a neighbouring range, their common edge is removed.
        for edge in (index, index + 1):
            place = bisect_left(edges, edge)
            if place < len(edges) and edges[place] == edge:
                del edges[place]
            else:
                edges.insert(place, edge)
        self._size += 1
        return True

    def to_rows(self) -> list[list[int]]:
        """Return the set as sorted rows [epoch, first, end], one for each range of consecutive indices first..end-1."""
        return [
            [epoch, first, end]
            for epoch, edges in sorted(self._edges.items())
            for first, end in zip(edges[::2], edges[1::2], strict=True)
        ]


class OnNonFinite(StrEnum):
    """Whether a group with a reward or log-prob that is NaN, infinite or missing counts as failed or as filtered."""

    FAIL = "fail"
    DROP = "drop"


class GroupState(StrEnum):
    """The state of a prompt group; running, ready and taken groups are called live."""

    RUNNING = "running"
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt group and its state.

    id: number of groups that were issued earlier. start: the start version, which is the version of the group's oldest
    token, or, until a token is sampled, the version with which generation was to start. attempts: number of times that
    generation was started from scratch. reason: why the group was filtered or failed, else empty. batch: number of the
    training batch to which the group was assigned when it was issued; None if batches are formed later.
    """

    id: int
    prompt: PromptRef
    start: int
    state: GroupState = GroupState.RUNNING
    attempts: int = 1
    reason: str = ""
    batch: int | None = None

    def to_row(self) -> list[int | str | None]:
        """Return this group, which must be running, ready or taken, as a JSON-compatible row.

        The row of a taken group has the state ready, so that a resumed run takes the group again.
        """
        state = GroupState.READY if self.state is GroupState.TAKEN else self.state
        prompt = self.prompt
        return [self.id, prompt.index, prompt.epoch, prompt.uid, self.start, state.value, self.attempts, self.batch]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Group:
        group_id, index, epoch, uid, start, state, attempts, batch = row
        return cls(group_id, PromptRef(index, epoch, uid), start, GroupState(state), attempts, batch=batch)


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Number of groups by state, and of filtered and failed groups by reason."""

    issued: int
    trained: int
    filtered: int
    failed: int
    live: int
    running: int
    ready: int
    taken: int
    filtered_by_reason: dict[str, int]
    failed_by_reason: dict[str, int]


class StalenessStats(Counter[int]):
    """Number of trained groups by staleness: the version when a group was trained minus that of its oldest token."""

    @property
    def sum(self) -> int:
        return sum(staleness * groups for staleness, groups in self.items())

    @property
    def max(self) -> int:
        return max(self, default=0)

    @property
    def mean(self) -> float:
        return self.sum / self.total() if self else 0.0


class FilterCount:
    """Counts how many groups are filtered until a batch is full, to stop a run that filters too many.

    Groups are counted in the order in which they were issued, as in synchronous training, so the count does not depend
    on which answers finish first. The count starts again from 0 after ``batch_groups`` groups were kept. Failed groups
    are not counted. `exceeded` becomes True at ``limit`` filtered groups; a limit of 0 means never.
    """

    def __init__(self, batch_groups: int, limit: int) -> None:
        self._batch_groups = batch_groups
        self._limit = limit
        self._kept = 0
        self._filtered = 0
        # Maps the id of each group, in issue order, to whether the group was kept (None until the group ends). Groups
        # that have been counted are deleted from the front. An OrderedDict finds its first entry at once, whereas a
        # plain dict would have to skip the places of all deleted entries.
        self._outcomes: OrderedDict[int, bool | None] = OrderedDict()

    @property
    def exceeded(self) -> bool:
        """Return whether the number of groups filtered since the last full batch has reached the limit."""
        return 0 < self._limit <= self._filtered

    def issued(self, group_id: int) -> None:
        self._outcomes[group_id] = None

    def ended(self, group_id: int, kept: bool) -> None:
        """Record whether a complete group was kept for training (``kept``) or filtered."""
        if group_id in self._outcomes:
            self._outcomes[group_id] = kept
            self._advance()

    def forget(self, group_id: int) -> None:
        """Leave out a group that has failed. If `ended` was called for the group before, it still counts."""
        if self._outcomes.get(group_id, True) is None:
            del self._outcomes[group_id]
            self._advance()

    def _advance(self) -> None:
        while self._outcomes and not self.exceeded:
            oldest = next(iter(self._outcomes))
            kept = self._outcomes[oldest]
            if kept is None:
                return
            del self._outcomes[oldest]
            self._kept += kept
            self._filtered += not kept
            if self._kept == self._batch_groups:
                self._kept = self._filtered = 0

# SPDX-License-Identifier: Apache-2.0
"""Prompts and prompt groups: their states, and what is counted about them.

A group is immutable; the sample ledger replaces it at each transition, so a reference shows its state at one moment.

    RUNNING -> READY -> TAKEN -> TRAINED      a restart leads from RUNNING or READY to RUNNING,
    RUNNING or READY -> FILTERED or FAILED    a restored snapshot from TAKEN to READY

A run trains millions of prompts, so issued and trained prompts are stored as sorted runs of consecutive indices. The
record stays small and can still show, after a resume, that each prompt was trained exactly once. Tests:
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

    index: its place in the data set, >= 0. Places in the sampler's order give the shortest runs; row numbers of a
    shuffled data set are also correct. epoch: number of completed passes over the data set, >= 0. uid: name of its
    group in the trainer's batch.
    """

    index: int
    epoch: int
    uid: str

    @property
    def key(self) -> tuple[int, int]:
        """(epoch, index), unique in a run."""
        return self.epoch, self.index


@dataclass(frozen=True)
class Prompt:
    """One row of the training data, not issued yet.

    index: its place in the data set. row: verl's batch of one, as the data loader collates it: the value of a column is
        ``row[name][0]``.
    """

    epoch: int
    index: int
    row: dict[str, Any]

    @property
    def reference(self) -> PromptRef:
        return PromptRef(index=self.index, epoch=self.epoch, uid=f"{self.epoch}-{self.index}")


class PromptSet:
    """A set of (epoch, index) pairs, stored per epoch as the ascending edges of its runs: first, end, first, ..."""

    def __init__(self, runs: Iterable[Sequence[int]] = ()) -> None:
        """Build the set from the rows that `to_rows` returns."""
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
        """Add the pair; return False if it was in the set already."""
        if key in self:
            return False
        epoch, index = key
        edges = self._edges.setdefault(epoch, [])
        # Insert the pair as a run of its own; an edge that it shares with a neighbouring run is removed, which merges
        # the two.
        for edge in (index, index + 1):
            place = bisect_left(edges, edge)
            if place < len(edges) and edges[place] == edge:
                del edges[place]
            else:
                edges.insert(place, edge)
        self._size += 1
        return True

    def to_rows(self) -> list[list[int]]:
        """[epoch, first, end] for every run of consecutive indices first..end-1, sorted."""
        return [
            [epoch, first, end]
            for epoch, edges in sorted(self._edges.items())
            for first, end in zip(edges[::2], edges[1::2], strict=True)
        ]


class OnNonFinite(StrEnum):
    """How a group with a reward or log-prob that is not finite is treated: as failed, or filtered."""

    FAIL = "fail"
    DROP = "drop"


class GroupState(StrEnum):
    """The state of a group; running, ready and taken groups are live."""

    RUNNING = "running"
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt group at one moment; the ledger replaces it at each transition.

    id: issue order, from 0. start: version of its oldest token, at first the version at which it was admitted.
    attempts:
    number of times that its generation was started from scratch. reason: why it was filtered or failed, else empty.
    batch:
    the batch it will be trained in, if batches are fixed at issue.
    """

    id: int
    prompt: PromptRef
    start: int
    state: GroupState = GroupState.RUNNING
    attempts: int = 1
    reason: str = ""
    batch: int | None = None

    def to_row(self) -> list[int | str | None]:
        """Return a JSON-compatible record of a live group; a taken group is recorded as ready, to be taken again."""
        state = GroupState.READY if self.state is GroupState.TAKEN else self.state
        prompt = self.prompt
        return [self.id, prompt.index, prompt.epoch, prompt.uid, self.start, state.value, self.attempts, self.batch]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Group:
        """Return the group of a record made by `to_row`."""
        group_id, index, epoch, uid, start, state, attempts, batch = row
        return cls(group_id, PromptRef(index, epoch, uid), start, GroupState(state), attempts, batch=batch)


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Number of groups by state; `filtered` and `failed` are totals, with their reasons in separate fields."""

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
    """Number of trained groups by staleness: the version at training minus that of their oldest token."""

    @property
    def sum(self) -> int:
        """Sum of the staleness of all recorded groups."""
        return sum(staleness * groups for staleness, groups in self.items())

    @property
    def max(self) -> int:
        """Largest staleness, 0 if nothing was recorded."""
        return max(self, default=0)

    @property
    def mean(self) -> float:
        """Mean staleness, 0.0 if nothing was recorded."""
        return self.sum / self.total() if self else 0.0


class FilterCount:
    """Counts the groups filtered for each batch in the way that synchronous training would count them.

    Outcomes are counted in issue order, in whatever order groups end: a batch is complete with its b-th kept group, and
    the count then starts again. So neither how far generation runs ahead nor which answers finish first changes the
    count. A failed group says nothing about its prompt and is not counted.

    batch_groups: b. limit: number of filtered groups allowed for one batch; 0 means any number.
    """

    def __init__(self, batch_groups: int, limit: int) -> None:
        self._batch_groups = batch_groups
        self._limit = limit
        self._kept = 0
        self._filtered = 0
        # Outcomes in issue order since the oldest group without one (None). An OrderedDict, because a plain dict scans
        # past all deleted entries each time it is asked for the first one.
        self._outcomes: OrderedDict[int, bool | None] = OrderedDict()

    @property
    def exceeded(self) -> bool:
        """Return whether as many groups were filtered for the current batch as the limit allows."""
        return 0 < self._limit <= self._filtered

    def issued(self, group_id: int) -> None:
        """Record that a group was issued."""
        self._outcomes[group_id] = None

    def ended(self, group_id: int, kept: bool) -> None:
        """Record whether a complete group was kept or filtered."""
        if group_id in self._outcomes:
            self._outcomes[group_id] = kept
            self._advance()

    def forget(self, group_id: int) -> None:
        """Drop a group that ended in another way, unless its outcome is already recorded."""
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

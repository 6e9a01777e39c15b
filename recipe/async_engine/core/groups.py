# SPDX-License-Identifier: Apache-2.0
"""Prompts and prompt groups: their states, and the counts kept about them.

A `Group` is immutable. The sample ledger replaces it at each transition, so a reference keeps showing the old state.

    RUNNING -> READY -> TAKEN -> TRAINED      a restart leads from RUNNING or READY to RUNNING,
    RUNNING or READY -> FILTERED or FAILED    a restored snapshot from TAKEN to READY

A run trains millions of prompts, so issued and trained prompts are stored as sorted runs of consecutive indices. These
stay small and still show, after a resume, that each prompt was trained exactly once. Tests: tests/core/test_ledger.py,
tests/core/test_group_filter.py.
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

    index: position in the data set, >= 0. Positions in the sampler's order give the fewest runs; row numbers of a
    shuffled data set are also correct. epoch: number of completed passes over the data set, >= 0. uid: name of the
    prompt's group in the trainer's batch.
    """

    index: int
    epoch: int
    uid: str

    @property
    def key(self) -> tuple[int, int]:
        """Return (epoch, index), which is unique in a run."""
        return self.epoch, self.index


@dataclass(frozen=True)
class Prompt:
    """One row of the training data that has not been issued yet.

    index: position in the data set. row: a batch of one prompt as verl's data loader collates it; the value of a column
    is ``row[name][0]``.
    """

    epoch: int
    index: int
    row: dict[str, Any]

    @property
    def reference(self) -> PromptRef:
        return PromptRef(index=self.index, epoch=self.epoch, uid=f"{self.epoch}-{self.index}")


class PromptSet:
    """A set of (epoch, index) pairs, stored per epoch as the ascending edges of runs of indices: first, end, ..."""

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
        """Add the pair; return False if the set contained it already."""
        if key in self:
            return False
        epoch, index = key
        edges = self._edges.setdefault(epoch, [])
        # Insert the index as a run of its own; an edge that a neighbouring run has too is removed to merge the two.
        for edge in (index, index + 1):
            place = bisect_left(edges, edge)
            if place < len(edges) and edges[place] == edge:
                del edges[place]
            else:
                edges.insert(place, edge)
        self._size += 1
        return True

    def to_rows(self) -> list[list[int]]:
        """Return [epoch, first, end] for every run of consecutive indices first..end-1, sorted."""
        return [
            [epoch, first, end]
            for epoch, edges in sorted(self._edges.items())
            for first, end in zip(edges[::2], edges[1::2], strict=True)
        ]


class OnNonFinite(StrEnum):
    """Whether a group with a reward or log-prob that is not finite counts as failed, or as filtered."""

    FAIL = "fail"
    DROP = "drop"


class GroupState(StrEnum):
    """The state of a group. Running, ready and taken groups are live."""

    RUNNING = "running"
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt group in one state; the ledger replaces the object at each transition.

    id: position in issue order, from 0. start: the start version, which is the version of the oldest token, and until
    one is sampled the version at which the group was admitted. attempts: number of times that generation was started
    from scratch. reason: why the group was filtered or failed, else empty. batch: number of the batch that will train
    the group, if batches are fixed at issue.
    """

    id: int
    prompt: PromptRef
    start: int
    state: GroupState = GroupState.RUNNING
    attempts: int = 1
    reason: str = ""
    batch: int | None = None

    def to_row(self) -> list[int | str | None]:
        """Return a JSON-compatible row for a live group. A taken group is saved as ready, so that it is taken again."""
        state = GroupState.READY if self.state is GroupState.TAKEN else self.state
        prompt = self.prompt
        return [self.id, prompt.index, prompt.epoch, prompt.uid, self.start, state.value, self.attempts, self.batch]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Group:
        """Return the group of a row made by `to_row`."""
        group_id, index, epoch, uid, start, state, attempts, batch = row
        return cls(group_id, PromptRef(index, epoch, uid), start, GroupState(state), attempts, batch=batch)


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Number of groups by state. `filtered` and `failed` are totals; two more fields split them by reason."""

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
    """Number of trained groups by staleness: the version being trained minus that of the group's oldest token."""

    @property
    def sum(self) -> int:
        """Return the sum of the staleness of all counted groups."""
        return sum(staleness * groups for staleness, groups in self.items())

    @property
    def max(self) -> int:
        """Return the largest staleness, 0 if no group was counted."""
        return max(self, default=0)

    @property
    def mean(self) -> float:
        """Return the mean staleness, 0.0 if no group was counted."""
        return self.sum / self.total() if self else 0.0


class FilterCount:
    """Counts how many groups were filtered for each batch, as synchronous training would count them.

    Outcomes are counted in issue order, whatever the order in which groups end: a batch is complete with its b-th kept
    group, and the count then starts again. So the count depends neither on how far generation runs ahead nor on which
    answers finish first. A failed group says nothing about its prompt and is not counted.

    batch_groups: b. limit: number of filtered groups allowed for one batch; 0 means any number.
    """

    def __init__(self, batch_groups: int, limit: int) -> None:
        self._batch_groups = batch_groups
        self._limit = limit
        self._kept = 0
        self._filtered = 0
        # Outcomes in issue order, from the oldest group that has not ended (None). This is an OrderedDict because a
        # plain dict scans past all deleted entries each time its first entry is read.
        self._outcomes: OrderedDict[int, bool | None] = OrderedDict()

    @property
    def exceeded(self) -> bool:
        """Return whether the number of groups filtered for the current batch has reached the limit."""
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
        """Drop a group that ended without being kept or filtered. An outcome that is already recorded stays."""
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

# SPDX-License-Identifier: Apache-2.0
"""Prompts and their groups: what a group is, the states it goes through, and what is counted.

A group is immutable; the sample ledger replaces it at each transition, so a group in hand is how it was then.

    RUNNING -> READY -> TAKEN -> TRAINED      a restart leads from RUNNING or READY to RUNNING,
    RUNNING or READY -> FILTERED or FAILED    a restored snapshot from TAKEN to READY

A run trains millions of prompts; what was issued and what was trained is kept as sorted runs of consecutive indices,
so that the record stays small and "each prompt exactly once" can be shown from it after a resume. Tests:
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

    index: its place in the data set, >= 0. Places in the order in which the sampler yields the prompts make the
        shortest runs; row numbers of a shuffled data set are as correct. epoch: how often the data set was gone
        through before, >= 0. uid: the name of its group in the trainer's batch.
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

    index: its place in the data set. row: verl's batch of one, as the data loader collates it: a column's value is
        ``row[name][0]``.
    """

    epoch: int
    index: int
    row: dict[str, Any]

    @property
    def reference(self) -> PromptRef:
        return PromptRef(index=self.index, epoch=self.epoch, uid=f"{self.epoch}-{self.index}")


class PromptSet:
    """A set of (epoch, index) pairs, kept per epoch as the ascending edges of its runs: first, end, first, end, ..."""

    def __init__(self, runs: Iterable[Sequence[int]] = ()) -> None:
        """From the form that `to_rows` gives."""
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
        """Add the pair; False if it was in the set."""
        if key in self:
            return False
        epoch, index = key
        edges = self._edges.setdefault(epoch, [])
        # The pair is a run of its own; where one of its edges is another run's too, the two are one.
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
    """What a group counts as in which a reward or a log-prob is no finite number."""

    FAIL = "fail"
    DROP = "drop"


class GroupState(StrEnum):
    """The one state a group is in. The first three are live."""

    RUNNING = "running"
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt group at one moment; the ledger replaces it at each transition.

    id: issue order, from 0. start: version of its oldest token, at first the version it was admitted at. attempts:
    how often its generation was begun from scratch. reason: why it was filtered or failed, else empty. batch: the one
    it is to be trained in, where that is fixed at issue.
    """

    id: int
    prompt: PromptRef
    start: int
    state: GroupState = GroupState.RUNNING
    attempts: int = 1
    reason: str = ""
    batch: int | None = None

    def to_row(self) -> list[int | str | None]:
        """A JSON-able record of a live group. A taken one is recorded as it was before, ready and to be taken again."""
        state = GroupState.READY if self.state is GroupState.TAKEN else self.state
        prompt = self.prompt
        return [self.id, prompt.index, prompt.epoch, prompt.uid, self.start, state.value, self.attempts, self.batch]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Group:
        """The group of a record."""
        group_id, index, epoch, uid, start, state, attempts, batch = row
        return cls(group_id, PromptRef(index, epoch, uid), start, GroupState(state), attempts, batch=batch)


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Number of groups by state. `filtered` and `failed` are totals, split by reason beside them."""

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


class FilterCount:
    """How many groups a batch cost: those that were filtered, counted as synchronous training would count them.

    Outcomes are counted in the order of issue, whatever order groups end in: a batch is complete with its b-th kept
    group, and the count begins anew with each batch. So how far generation runs ahead, and which answers are done
    first, changes nothing. A group that fails says nothing of its prompt and is not counted.

    batch_groups: b. limit: filtered groups that one batch may cost; 0: any number.
    """

    def __init__(self, batch_groups: int, limit: int) -> None:
        self._batch_groups = batch_groups
        self._limit = limit
        self._kept = 0
        self._filtered = 0
        # Those issued since the oldest that has no outcome yet, in order; None: none yet.
        # A plain dict would look past every outcome that has left it, each time it is asked for its first one.
        self._outcomes: OrderedDict[int, bool | None] = OrderedDict()

    @property
    def exceeded(self) -> bool:
        """Whether the batch under way has cost as many filtered groups as it may."""
        return 0 < self._limit <= self._filtered

    def issued(self, group_id: int) -> None:
        """A group begins."""
        self._outcomes[group_id] = None

    def ended(self, group_id: int, kept: bool) -> None:
        """A group is complete: it is kept, or it is filtered."""
        if group_id in self._outcomes:
            self._outcomes[group_id] = kept
            self._advance()

    def forget(self, group_id: int) -> None:
        """A group ended otherwise; one that is counted already stays so."""
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

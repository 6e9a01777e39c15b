# SPDX-License-Identifier: Apache-2.0
"""Prompt groups, the states they go through, and their counts.

A group is immutable; the sample ledger replaces it at each transition, so a group in hand is how it was then.

    RUNNING -> READY -> TAKEN -> TRAINED      a restart leads from RUNNING or READY to RUNNING,
    RUNNING or READY -> FILTERED or FAILED    a restored snapshot from TAKEN to READY
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from recipe.async_engine.core.prompts import PromptRef

UNIFORM_REASON = "uniform"
NON_FINITE_REASON = "non_finite"


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

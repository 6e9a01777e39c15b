# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The ledger's journal: every transition since a checkpoint, and what of it a resumed run may keep.

Contract. A `JournaledLedger` tells its journal of every transition after it was made, and marks the place of every
snapshot. `replay` applies what follows a mark to the snapshot taken there. Of the transitions up to the first
publication after the snapshot everything is kept: complete groups stay complete, every prompt that was issued stays
issued. What follows that publication used weights that the checkpoint does not have, and is forgotten: its prompts
are issued anew. Training is never replayed, since the weights go back to the checkpoint's: a batch that was taken or
trained is ready again. So each prompt is trained exactly once relative to the checkpoint (docs/reliability.md), and
this holds for every prefix of a journal: a lost end costs work, never correctness.

Shown by tests/core/test_journal.py, and with a journal on disk and `kill -9` by tests/integration/test_crash_fuzz.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from recipe.async_engine.core.groups import Group, GroupState
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.prompts import PromptRef, PromptSet
from recipe.async_engine.core.staleness import StalenessStats

MARK = "mark"
"""Key of a journaled ledger's snapshot: names its place in the journal."""


class TransitionKind(StrEnum):
    """What happened to one group, or to the policy version."""

    ISSUED = "issued"
    READY = "ready"
    RESTARTED = "restarted"
    FILTERED = "filtered"
    FAILED = "failed"
    TAKEN = "taken"
    TRAINED = "trained"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class Transition:
    """One transition, as it was made.

    version: the policy version after it. group: the group's record (`Group.to_row`) after it; None for a publication.
    reason: why a group was filtered or failed, else empty.
    """

    kind: TransitionKind
    version: int
    group: Sequence[Any] | None = None
    reason: str = ""

    @property
    def group_id(self) -> int | None:
        """Which group it is about."""
        return None if self.group is None else int(self.group[0])


class Journal(Protocol):
    """Where a ledger's transitions go, in their order. Called with the ledger's lock held: it must not block."""

    def append(self, transition: Transition) -> None:
        """Record a transition."""

    def mark(self) -> str:
        """Name this place, between the transition before and the one after."""


class JournaledLedger(SampleLedger):
    """A sample ledger that tells `journal` of what it does; with None, it is a plain one."""

    journal: Journal | None = None

    def issue(self, prompt: PromptRef) -> Group:
        return self._tell(TransitionKind.ISSUED, super().issue(prompt))

    def mark_ready(self, group_id: int, oldest_version: int) -> Group:
        return self._tell(TransitionKind.READY, super().mark_ready(group_id, oldest_version))

    def restart(self, group_id: int) -> Group:
        return self._tell(TransitionKind.RESTARTED, super().restart(group_id))

    def filter(self, group_id: int, reason: str) -> Group:
        return self._tell(TransitionKind.FILTERED, super().filter(group_id, reason))

    def fail(self, group_id: int, reason: str) -> Group:
        return self._tell(TransitionKind.FAILED, super().fail(group_id, reason))

    def take(self) -> list[Group]:
        return [self._tell(TransitionKind.TAKEN, group) for group in super().take()]

    def mark_trained(self) -> StalenessStats:
        leased = self.leased()
        staleness = super().mark_trained()
        for group in leased:
            self._tell(TransitionKind.TRAINED, group)
        return staleness

    def publish(self) -> int:
        version = super().publish()
        if self.journal is not None:
            self.journal.append(Transition(TransitionKind.PUBLISHED, version))
        return version

    def snapshot(self) -> dict[str, Any]:
        snapshot = super().snapshot()
        return snapshot if self.journal is None else {**snapshot, MARK: self.journal.mark()}

    def _tell(self, kind: TransitionKind, group: Group) -> Group:
        if self.journal is not None:
            self.journal.append(Transition(kind, self.version, group.to_row(), group.reason))
        return group


@dataclass(frozen=True, slots=True)
class Replayed:
    """A snapshot with the transitions that followed it.

    snapshot: for `SampleLedger.restore`. issued: the groups issued after it, in that order, whatever became of them.
    ready: those that were completed after it and wait to be trained.
    """

    snapshot: dict[str, Any]
    issued: list[Group]
    ready: list[int]


def replay(snapshot: Mapping[str, Any], transitions: Iterable[Transition]) -> Replayed:
    """What a resumed run may keep of the transitions that were made after this snapshot, in their order.

    A READY that is left out of `transitions`, because the group's answers are lost, leaves its group running.
    """
    live = {row[0]: list(row) for row in snapshot["live"]}
    counts = {kind: Counter(snapshot[kind.value]) for kind in (TransitionKind.FILTERED, TransitionKind.FAILED)}
    prompts = PromptSet(snapshot["issued_prompts"])
    issued: list[Group] = []
    ready: dict[int, None] = {}
    for transition in transitions:
        if transition.kind is TransitionKind.PUBLISHED:
            break
        if transition.group is None or transition.kind in (TransitionKind.TAKEN, TransitionKind.TRAINED):
            continue
        row = list(transition.group)
        if transition.kind in counts:
            del live[row[0]]
            counts[transition.kind][transition.reason] += 1
            continue
        live[row[0]] = row
        if transition.kind is TransitionKind.ISSUED:
            issued.append(Group.from_row(row, transition.version))
            prompts.add(issued[-1].prompt.key)
        elif transition.kind is TransitionKind.READY:
            ready[row[0]] = None
    advanced = {
        **snapshot,
        "issued": snapshot["issued"] + len(issued),
        "issued_prompts": prompts.to_rows(),
        "live": [live[group_id] for group_id in sorted(live)],
        **{kind.value: dict(count) for kind, count in counts.items()},
    }
    states = {group_id: row[5] for group_id, row in live.items()}
    return Replayed(advanced, issued, [group_id for group_id in ready if states.get(group_id) == GroupState.READY])

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
"""What a journal says of the time after a snapshot, and that every prefix of it restores to a ledger that holds."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import GroupState
from recipe.async_engine.core.journal import MARK, JournaledLedger, Transition, TransitionKind, replay
from recipe.async_engine.core.prompts import PromptRef

GATE = GateSettings(batch_groups=2, batches_per_version=1, max_staleness=2, pipeline_depth=2)


class ListJournal:
    """A journal in memory, with marks by name."""

    def __init__(self) -> None:
        self.transitions: list[Transition] = []
        self.marks: dict[str, int] = {}

    def append(self, transition: Transition) -> None:
        self.transitions.append(transition)

    def mark(self) -> str:
        name = f"mark-{len(self.marks)}"
        self.marks[name] = len(self.transitions)
        return name

    def since(self, mark: str) -> list[Transition]:
        return self.transitions[self.marks[mark] :]


def journaled(gate: GateSettings = GATE, **bounds: Any) -> tuple[JournaledLedger, ListJournal]:
    ledger = JournaledLedger(gate, **bounds)
    ledger.journal = journal = ListJournal()
    return ledger, journal


def issue(ledger: JournaledLedger, count: int) -> list[int]:
    first = ledger.counts().issued
    return [ledger.issue(PromptRef(n, 0, f"uid-{n}")).id for n in range(first, first + count)]


def saved(ledger: JournaledLedger) -> dict[str, Any]:
    return json.loads(json.dumps(ledger.snapshot()))


def restored(snapshot: dict[str, Any], transitions: list[Transition], gate: GateSettings = GATE) -> JournaledLedger:
    return JournaledLedger.restore(replay(snapshot, transitions).snapshot, gate)


def test_every_transition_is_told_with_its_group_and_the_version_after_it() -> None:
    ledger, journal = journaled()
    a, b, c, d, e = issue(ledger, 5)
    ledger.restart(a)
    for group_id in (a, b):
        ledger.mark_ready(group_id, 0)
    ledger.filter(c, "constant")
    ledger.fail(d, "broken")
    ledger.take()
    ledger.mark_trained()
    ledger.publish()
    told = [(step.kind.value, step.group_id, step.version) for step in journal.transitions]
    assert told == [
        *[("issued", group_id, 0) for group_id in (a, b, c, d, e)],
        ("restarted", a, 0),
        ("ready", a, 0),
        ("ready", b, 0),
        ("filtered", c, 0),
        ("failed", d, 0),
        ("taken", a, 0),
        ("taken", b, 0),
        ("trained", a, 0),
        ("trained", b, 0),
        ("published", None, 1),
    ]
    assert [step.reason for step in journal.transitions if step.reason] == ["constant", "broken"]


def test_ledger_without_a_journal_makes_plain_snapshots() -> None:
    ledger = JournaledLedger(GATE)
    issue(ledger, 1)
    assert MARK not in ledger.snapshot()


def test_what_was_completed_after_the_snapshot_is_kept_and_what_was_trained_is_ready_again() -> None:
    ledger, journal = journaled()
    first = issue(ledger, 3)
    snapshot = saved(ledger)
    later = issue(ledger, 3)
    for group_id in (first[0], later[0], later[1]):
        ledger.mark_ready(group_id, 0)
    ledger.fail(first[1], "broken")
    ledger.take()
    ledger.mark_trained()
    replayed = replay(snapshot, journal.since(snapshot[MARK]))
    assert [group.id for group in replayed.issued] == later
    assert replayed.ready == [first[0], later[0], later[1]]
    again = JournaledLedger.restore(replayed.snapshot, GATE)
    assert [group.id for group in again.in_state(GroupState.READY)] == [first[0], later[0], later[1]]
    assert [group.id for group in again.in_state(GroupState.RUNNING)] == [first[2], later[2]]
    counts = again.counts()
    assert (counts.issued, counts.trained, counts.failed_by_reason) == (6, 0, {"broken": 1})
    assert not again.can_issue() or again.issue(PromptRef(6, 0, "next")).id == 6


def test_what_follows_a_publication_is_forgotten_and_its_prompts_can_be_issued_again() -> None:
    ledger, journal = journaled()
    snapshot = saved(ledger)
    for group_id in issue(ledger, 2):
        ledger.mark_ready(group_id, 0)
    ledger.take()
    ledger.mark_trained()
    ledger.publish()
    issue(ledger, 2)
    again = restored(snapshot, journal.since(snapshot[MARK]))
    assert (again.version, again.counts().issued, again.counts().ready) == (0, 2, 2)
    assert issue(again, 1) == [2]


def test_complete_group_whose_answers_are_lost_runs_again() -> None:
    ledger, journal = journaled()
    snapshot = saved(ledger)
    (group_id,) = issue(ledger, 1)
    ledger.mark_ready(group_id, 0)
    transitions = [step for step in journal.since(snapshot[MARK]) if step.kind is not TransitionKind.READY]
    again = restored(snapshot, transitions)
    assert [group.id for group in again.in_state(GroupState.RUNNING)] == [group_id]


def test_group_that_was_running_at_the_snapshot_keeps_its_older_start_when_it_was_completed_later() -> None:
    ledger, journal = journaled()
    groups = issue(ledger, 4)
    for group_id in groups[:2]:
        ledger.mark_ready(group_id, 0)
    ledger.take()
    ledger.mark_trained()
    ledger.publish()
    snapshot = saved(ledger)
    ledger.mark_ready(groups[2], 0)
    again = restored(snapshot, journal.since(snapshot[MARK]))
    starts = {group.id: (group.start, group.state) for group in map(again.find, groups[2:]) if group is not None}
    assert starts == {groups[2]: (0, GroupState.READY), groups[3]: (1, GroupState.RUNNING)}


def work(ledger: JournaledLedger, rng: random.Random, steps: int, save: float) -> list[dict[str, Any]]:
    """Random legal transitions, with snapshots at versions' ends."""
    snapshots = [saved(ledger)]
    for _ in range(steps):
        running = ledger.in_state(GroupState.RUNNING)
        choice = rng.random()
        if ledger.next_batch() is not None and choice < 0.5:
            ledger.take()
            ledger.mark_trained()
            if ledger.batches_left == 0:
                ledger.publish()
                if rng.random() < save:
                    snapshots.append(saved(ledger))
        elif ledger.can_issue() and (choice < 0.75 or not running):
            issue(ledger, 1)
        elif running:
            group = rng.choice(running)
            if choice < 0.9:
                ledger.mark_ready(group.id, rng.randint(group.start, ledger.version))
            else:
                rng.choice((ledger.restart, lambda i: ledger.fail(i, "a"), lambda i: ledger.filter(i, "b")))(group.id)
    return snapshots


@pytest.mark.parametrize("whole", [False, True])
@given(
    seed=st.integers(0, 2**32), b=st.integers(1, 3), k=st.integers(1, 3), bound=st.integers(0, 3), cut=st.floats(0, 1)
)
@settings(max_examples=60, deadline=None)
def test_every_prefix_of_a_journal_restores_to_a_ledger_that_holds_and_trains_each_prompt_once(
    whole: bool, seed: int, b: int, k: int, bound: int, cut: float
) -> None:
    rng = random.Random(seed)
    k, bound = (1, min(bound, 1)) if whole else (k, bound)
    gate = GateSettings(b, k, bound, bound if whole else rng.uniform(0, bound))
    ledger, journal = journaled(gate, whole_batches=whole)
    for snapshot in work(ledger, rng, 80, save=0.3):
        since = journal.since(snapshot[MARK])
        again = JournaledLedger.restore(
            replay(snapshot, since[: round(cut * len(since))]).snapshot, gate, whole_batches=whole
        )
        # `restore` has checked the ledger's identity and the gate's invariant; the run goes on from here.
        trained = {(epoch, n) for epoch, first, end in snapshot["trained_prompts"] for n in range(first, end)}
        assert again.version == snapshot["version"]
        assert {(epoch, n) for epoch, first, end in again.trained_prompts() for n in range(first, end)} == trained
        assert not trained & {group.prompt.key for group in again.in_state(GroupState.READY)}
        again.journal = ListJournal()
        work(again, rng, 40, save=0.3)
        again.check_identity()

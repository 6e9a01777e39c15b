# SPDX-License-Identifier: Apache-2.0
"""Properties of the staleness gate and the sample ledger over arbitrary and over random schedules."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from math import floor

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedule_simulator import Schedule, run_schedules

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import Group, GroupState, PromptRef
from recipe.async_engine.core.ledger import SampleLedger

SCHEDULES = int(os.environ.get("RECIPE_GATE_SCHEDULES", "10000"))
BLOCKS = 4


@st.composite
def gate_settings(draw: st.DrawFn) -> GateSettings:
    bound = draw(st.integers(0, 3))
    depth = draw(st.fractions(0, bound, max_denominator=12))
    return GateSettings(draw(st.integers(1, 3)), draw(st.integers(1, 3)), bound, depth)


class LedgerMachine(RuleBasedStateMachine):
    """Any order of the ledger's transitions, against a model that recomputes every promise from the definition."""

    @initialize(drawn=gate_settings())
    def begin(self, drawn: GateSettings) -> None:
        self.settings = drawn
        self.ledger = SampleLedger(drawn)
        self.version = self.announced = self.taken = self.issued = self.filtered = self.failed = 0
        self.starts: dict[int, int] = {}
        self.trained: list[int] = []

    def groups(self, *states: GroupState) -> list[Group]:
        return [group for state in states for group in self.ledger.in_state(state)]

    def pick(self, data: st.DataObject, *states: GroupState) -> Group:
        return data.draw(st.sampled_from(self.groups(*states)))

    @precondition(lambda self: self.ledger.can_issue())
    @rule()
    def issue(self) -> None:
        group = self.ledger.issue(PromptRef(self.issued, 0, str(self.issued)))
        self.issued += 1
        assert group.start == self.announced
        self.starts[group.id] = self.announced

    @precondition(lambda self: self.groups(GroupState.RUNNING))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = self.pick(data, GroupState.RUNNING)
        oldest = data.draw(st.integers(self.starts[group.id], self.announced))
        self.ledger.mark_ready(group.id, oldest)
        self.starts[group.id] = oldest

    @precondition(lambda self: self.groups(GroupState.RUNNING, GroupState.READY))
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        group = self.pick(data, GroupState.RUNNING, GroupState.READY)
        self.ledger.restart(group.id)
        self.starts[group.id] = self.announced

    @precondition(lambda self: self.groups(GroupState.RUNNING, GroupState.READY))
    @rule(data=st.data(), fails=st.booleans())
    def give_up(self, data: st.DataObject, fails: bool) -> None:
        group = self.pick(data, GroupState.RUNNING, GroupState.READY)
        if fails:
            self.ledger.fail(group.id, "reward_error")
            self.failed += 1
        else:
            self.ledger.filter(group.id, "constant_reward")
            self.filtered += 1
        del self.starts[group.id]

    @precondition(lambda self: not self.ledger.leased() and self.ledger.next_batch() is not None)
    @rule()
    def take(self) -> None:
        batch = self.ledger.take()
        assert len(batch) == self.settings.batch_groups
        for group in batch:
            assert 0 <= self.version - self.starts[group.id] <= self.settings.max_staleness
        self.taken += 1
        assert self.taken <= self.settings.batches_per_version

    @precondition(lambda self: self.ledger.leased())
    @rule()
    def train(self) -> None:
        ids = [group.id for group in self.ledger.leased()]
        assert self.ledger.mark_trained().max <= self.settings.max_staleness
        self.trained += ids
        for group_id in ids:
            del self.starts[group_id]

    @precondition(lambda self: not self.ledger.leased() and self.ledger.batches_left == 0)
    @rule()
    def seal(self) -> None:
        self.version += 1
        self.taken = 0
        assert self.ledger.seal() == self.version

    @precondition(lambda self: self.ledger.announced < self.ledger.version)
    @rule()
    def announce(self) -> None:
        self.announced += 1
        assert self.ledger.announce() == self.announced

    @rule()
    def resume(self) -> None:
        if self.ledger.leased():
            self.taken -= 1
        self.announced = self.version
        self.ledger = SampleLedger.restore(json.loads(json.dumps(self.ledger.snapshot())), self.settings)

    @rule()
    def all_running_groups_end_and_a_batch_can_be_taken(self) -> None:
        """Liveness: with prompts left, what is sealed announced and what runs ended, there is a batch or a version."""
        if self.ledger.leased() or self.ledger.batches_left == 0:
            return
        while self.ledger.announced < self.ledger.version:
            self.announce()
        while True:
            for group in self.groups(GroupState.RUNNING):
                self.ledger.mark_ready(group.id, self.starts[group.id])
            if not self.ledger.can_issue():
                break
            self.issue()
        assert self.ledger.next_batch() is not None

    @invariant()
    def every_start_has_places_for_its_groups(self) -> None:
        if not hasattr(self, "ledger"):
            return
        drawn, leased = self.settings, {group.id for group in self.ledger.leased()}
        assert all(start <= self.announced for start in self.starts.values())
        open_starts = [start for group_id, start in self.starts.items() if group_id not in leased]
        batches_left = drawn.batches_per_version - self.taken
        for start in range(self.version - drawn.max_staleness - 2, self.version + 1):
            left = (start + drawn.max_staleness - self.version) * drawn.batches_per_version + batches_left
            assert sum(other <= start for other in open_starts) <= max(0, left * drawn.batch_groups)
        ahead = floor(Fraction(drawn.pipeline_depth) * drawn.version_groups)
        assert len(open_starts) <= ahead + batches_left * drawn.batch_groups

    @invariant()
    def every_group_is_accounted_for_once(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_identity()
        counts = self.ledger.counts()
        assert (counts.issued, counts.filtered, counts.failed) == (self.issued, self.filtered, self.failed)
        assert counts.trained == len(self.trained) == len(set(self.trained))
        assert counts.live == len(self.starts)
        rows = self.ledger.trained_prompts()
        assert [index for _, first, end in rows for index in range(first, end)] == sorted(self.trained)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_random_schedule_breaks_a_promise(block: int) -> None:
    size = -(-SCHEDULES // BLOCKS)
    tally = run_schedules(range(block * size, (block + 1) * size))
    # The schedules are worth something only if everything that can happen did, and the bound was reached.
    assert {key[0] for key in tally.by_plan} == {1, 2, 3}
    assert {key[1] for key in tally.by_plan} == {0, 1, 2, 3, 4}
    for name in ("trained", "filtered", "failed", "restarted", "resumed", "at_bound", "late"):
        assert getattr(tally, name) > 0, name


def test_schedule_is_determined_by_its_seed() -> None:
    assert Schedule(7).run() == Schedule(7).run()

# SPDX-License-Identifier: Apache-2.0
"""The prompt manager under random schedules of finishing, failing and interrupted trajectories."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recipe.async_engine.core.errors import LedgerError
from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import GroupState, PromptRef
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import OldestReady, Turns
from recipe.async_engine.core.prompt_manager import (
    PromptCounts,
    PromptManager,
    Trajectory,
    TrajectoryState,
    Why,
)


def new_manager(
    batch: int = 2, depth: float = 1, bound: int = 1, size: int = 2, slots: int = 4, whole_groups: bool = False
) -> PromptManager:
    policy = OldestReady() if whole_groups else Turns()
    return PromptManager(SampleLedger(GateSettings(batch, 1, bound, depth), policy=policy), size, slots)


def prompt(index: int) -> PromptRef:
    return PromptRef(index, 0, f"0-{index}")


def fill(manager: PromptManager, first: int = 0) -> list[Trajectory]:
    """Give away every free slot, to new prompts from ``first`` on where nothing waits."""
    given = []
    while True:
        picked = manager.next()
        if picked is None:
            if not manager.wants_prompt():
                return given
            manager.issue(prompt(first))
            first += 1
            continue
        given.append(picked)


def finish(manager: PromptManager, group_id: int, version: int = 0) -> None:
    for index in range(manager.group_size):
        manager.sampled(Trajectory(group_id, index))
    manager.complete(group_id, version)


def train(manager: PromptManager) -> None:
    """End the turn with a batch, train it and publish."""
    manager.ledger.take()
    manager.slots = 0
    manager.ledger.mark_trained()
    manager.ledger.seal()
    manager.ledger.announce()


@pytest.mark.parametrize(("size", "slots"), [(0, 4), (2, 0)])
def test_groups_and_slots_are_at_least_one(size: int, slots: int) -> None:
    with pytest.raises(LedgerError, match=f"{size} trajectories per group on {slots} slots: both must be at least 1"):
        new_manager(size=size, slots=slots)


@pytest.mark.parametrize(("portion", "picked"), [(1, 2), (2, 2), (3, 4), (None, 6)])
def test_a_portion_of_a_stream_ends_with_a_whole_group(portion: int | None, picked: int) -> None:
    manager = new_manager(batch=3, size=2, slots=6, whole_groups=True)
    manager.open()
    prompts = iter(map(prompt, range(3)))
    found = list(manager.picks(lambda: bool(manager.issue(next(prompts))), portion))
    assert len(found) == picked


def test_while_nothing_generates_it_is_said_what_keeps_the_run_from_going_on() -> None:
    manager = new_manager(whole_groups=True)
    assert [manager.why(True, True), manager.why(True, False)] == [Why.REWARD, Why.DRAIN]
    manager.open()
    assert [manager.why(True, False), manager.why(False, False)] == [Why.PROMPTS, Why.END]


def test_slots_are_filled_trajectory_by_trajectory() -> None:
    manager = new_manager(size=2, slots=3)
    manager.open()
    assert fill(manager) == [Trajectory(0, 0), Trajectory(0, 1), Trajectory(1, 0)]
    manager.sampled(Trajectory(0, 1))
    assert fill(manager, 2) == [Trajectory(1, 1)]
    manager.sampled(Trajectory(0, 0))
    assert fill(manager, 2) == [Trajectory(2, 0)]


def test_oversampling_ends_at_the_ledgers_limit() -> None:
    manager = new_manager(batch=2, depth=1, slots=100)
    manager.open()
    assert len({trajectory.group_id for trajectory in fill(manager)}) == 4
    assert not manager.wants_prompt()


def test_what_was_interrupted_keeps_its_slot_and_the_oldest_that_waits_gets_a_free_one() -> None:
    manager = new_manager(batch=1, depth=2, bound=2, size=1, slots=2)
    manager.open()
    assert fill(manager) == [Trajectory(0, 0), Trajectory(1, 0)]
    finish(manager, 0)
    assert fill(manager, 2) == [Trajectory(2, 0)]
    train(manager)
    assert manager.counts() == PromptCounts(0, 2, 0, 2, 0)
    manager.slots = 2
    assert manager.counts() == PromptCounts(0, 0, 2, 0, 0)
    assert manager.begin_again(Trajectory(1, 0)), "a failed attempt has its slot still"
    assert fill(manager, 3) == []
    finish(manager, 2, version=0)
    assert fill(manager, 3) == [Trajectory(3, 0)]


def test_nothing_begins_before_generation_or_without_slots() -> None:
    manager = new_manager()
    assert manager.next() is None
    assert not manager.wants_prompt()
    with pytest.raises(LedgerError, match="before generation begins"):
        manager.issue(prompt(0))
    manager.open()
    running = fill(manager)
    manager.slots = 0
    assert manager.generating == 0
    assert manager.counts().interrupted_trajectories == len(running)
    assert manager.why(True, False) is Why.TURN
    assert manager.next() is None and not manager.wants_prompt()


def test_a_last_token_may_be_reported_after_its_turn() -> None:
    manager = new_manager(size=1)
    manager.open()
    late = fill(manager)[0]
    manager.slots = 0
    manager.sampled(late)
    manager.complete(late.group_id, 0)
    assert manager.ledger.counts().ready == 1
    manager.slots = 4
    assert late not in fill(manager, 10)


def test_an_incomplete_group_is_never_complete() -> None:
    manager = new_manager(size=2)
    manager.open()
    fill(manager)
    manager.sampled(Trajectory(0, 0))
    with pytest.raises(LedgerError, match="group 0 is not complete"):
        manager.complete(0, 0)


def test_only_a_group_of_which_nothing_runs_is_adopted_and_only_once() -> None:
    manager = new_manager(size=2)
    group = manager.ledger.issue(prompt(0))
    pending, running = TrajectoryState.PENDING, TrajectoryState.RUNNING
    for states in ([], [pending, running]):
        with pytest.raises(LedgerError, match=r"trajectories of group \d need a state each, none of them RUNNING"):
            manager.adopt(group, states)
    manager.adopt(group, [pending, pending])
    with pytest.raises(LedgerError, match="adopted before"):
        manager.adopt(group, [pending, pending])
    ended = manager.ledger.mark_ready(manager.ledger.issue(prompt(1)).id, 0)
    with pytest.raises(LedgerError, match="cannot be adopted"):
        manager.adopt(ended, [pending, pending])


def test_a_trajectory_that_has_not_begun_has_no_last_token_and_no_failed_attempt() -> None:
    manager = new_manager(size=2, slots=1)
    manager.open()
    fill(manager)
    with pytest.raises(LedgerError, match="is pending, expected running"):
        manager.sampled(Trajectory(0, 1))
    with pytest.raises(LedgerError, match="is pending, expected running or sampled"):
        manager.begin_again(Trajectory(0, 1))


def test_a_whole_group_begins_when_all_of_it_may() -> None:
    manager = new_manager(size=2, slots=3, whole_groups=True)
    manager.open()
    assert fill(manager) == [Trajectory(0, 0), Trajectory(0, 1)]
    manager.sampled(Trajectory(0, 0))
    assert fill(manager, 1) == [Trajectory(1, 0), Trajectory(1, 1)]


def test_a_group_has_as_many_trajectories_as_it_is_issued_with() -> None:
    manager = new_manager(size=2, slots=8)
    manager.open()
    manager.issue(prompt(0), 5)
    manager.issue(prompt(1))
    picked = [manager.next() for _ in range(7)]
    assert picked == [*(Trajectory(0, index) for index in range(5)), Trajectory(1, 0), Trajectory(1, 1)]


def test_a_whole_group_of_more_trajectories_than_slots_begins_when_all_are_free_and_takes_each_that_is_freed() -> None:
    manager = new_manager(size=2, slots=3, whole_groups=True)
    manager.open()
    manager.issue(prompt(0))
    manager.issue(prompt(1), 5)
    assert [manager.next() for _ in range(3)] == [Trajectory(0, 0), Trajectory(0, 1), None]
    manager.sampled(Trajectory(0, 0))
    assert manager.next() is None
    manager.sampled(Trajectory(0, 1))
    assert [manager.next() for _ in range(4)] == [*(Trajectory(1, index) for index in range(3)), None]
    for index in range(5):
        manager.sampled(Trajectory(1, index))
        assert manager.next() == (Trajectory(1, index + 3) if index < 2 else None)
    assert manager.is_sampled(1)


def test_what_is_left_of_a_restored_group_fits_where_a_whole_one_does_not() -> None:
    manager = new_manager(size=2, slots=3, whole_groups=True)
    for index, states in enumerate((["sampled", "pending"], ["pending", "pending"], ["pending", "pending"])):
        manager.adopt(manager.ledger.issue(prompt(index)), [TrajectoryState(state) for state in states])
    assert manager.counts() == PromptCounts(3, 0, 0, 0, 0)
    manager.open()
    assert fill(manager, 3) == [Trajectory(0, 1), Trajectory(1, 0), Trajectory(1, 1)]


def test_a_drain_lets_what_runs_go_on_and_begins_nothing() -> None:
    manager = new_manager(size=1, slots=3, whole_groups=True)
    manager.open()
    running, rewarded, _ = fill(manager)
    manager.sampled(rewarded)
    manager.drain()
    assert manager.begin_again(running), "it has a slot, in which the drain waits for it"
    assert not manager.begin_again(rewarded)
    assert fill(manager, 3) == []
    assert manager.running == 2
    manager.sampled(running)
    manager.open()
    assert fill(manager, 3) == [rewarded, Trajectory(3, 0)]


class TurnsMachine(RuleBasedStateMachine):
    """Turns with random work; every call the manager permits is legal for the ledger too."""

    @initialize(
        batch=st.integers(1, 3),
        bound=st.integers(0, 3),
        depth=st.fractions(0, 1, max_denominator=4),
        size=st.integers(1, 3),
        slots=st.integers(1, 8),
    )
    def begin(self, batch: int, bound: int, depth: Any, size: int, slots: int) -> None:
        self.settings = GateSettings(batch, 1, bound, depth * bound)
        self.manager = PromptManager(SampleLedger(self.settings, policy=Turns()), size, slots)
        self.prompts = 0
        self.versions: dict[int, int] = {}
        self.trained, self.slots = 0, slots
        self.manager.open()

    def _open_group_ids(self) -> list[int]:
        return [group.id for group in self.manager.ledger.in_state(GroupState.RUNNING)]

    @rule()
    @precondition(lambda self: not self.manager.slots)
    def open(self) -> None:
        self.manager.slots = self.slots

    @rule(count=st.integers(1, 8))
    @precondition(lambda self: self.manager.slots)
    def pick(self, count: int) -> None:
        for _ in range(count):
            waiting = self._waiting()
            picked = self.manager.next()
            if picked is None:
                assert not waiting or self.manager.running >= self.manager.slots
                if not self.manager.wants_prompt():
                    return
                self.manager.issue(prompt(self.prompts))
                self.prompts += 1
                continue
            assert picked == waiting[0], "the first to wait is the first to run"
            self.versions.setdefault(picked.group_id, self.manager.ledger.version)

    def _waiting(self) -> list[Trajectory]:
        order = [
            (group.start, group.id, index)
            for group in self.manager.ledger.in_state(GroupState.RUNNING)
            for index in range(self.manager.group_size)
            if self.manager.state(Trajectory(group.id, index)) is TrajectoryState.PENDING
        ]
        return [Trajectory(group_id, index) for _, group_id, index in sorted(order)]

    def _in_state(self, *states: TrajectoryState) -> list[Trajectory]:
        ids = [Trajectory(group, index) for group in self._open_group_ids() for index in range(self.manager.group_size)]
        return [trajectory for trajectory in ids if self.manager.state(trajectory) in states]

    @rule(data=st.data(), count=st.integers(1, 6))
    def sample(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            unfinished = self._in_state(TrajectoryState.RUNNING)
            if unfinished:
                self.manager.sampled(data.draw(st.sampled_from(unfinished)))

    @rule()
    def complete(self) -> None:
        for group_id in self._open_group_ids():
            if self._states(group_id) == {TrajectoryState.SAMPLED}:
                self.manager.complete(group_id, self.versions[group_id])

    def _states(self, group_id: int) -> set[TrajectoryState]:
        return {self.manager.state(Trajectory(group_id, index)) for index in range(self.manager.group_size)}

    def _sample_a_batch(self) -> None:
        """Last tokens of what began first, a trajectory at a time, until there is a batch; the others run on."""
        self.complete()
        while self.manager.ledger.next_batch() is None:
            self.pick(self.manager.slots + self.manager.group_size)
            running = self._in_state(TrajectoryState.RUNNING)
            assert running, "nothing runs, and no batch can be taken"
            self.manager.sampled(running[0])
            self.complete()

    @rule(data=st.data())
    def fail_an_attempt(self, data: st.DataObject) -> None:
        began = self._in_state(TrajectoryState.RUNNING, TrajectoryState.SAMPLED)
        if began:
            self.manager.begin_again(data.draw(st.sampled_from(began)))

    @rule(data=st.data())
    def give_up_a_group(self, data: st.DataObject) -> None:
        if self._open_group_ids():
            group_id = data.draw(st.sampled_from(self._open_group_ids()))
            self.manager.forget(group_id)
            self.manager.ledger.fail(group_id, "test")

    @rule(next_one=st.booleans())
    @precondition(lambda self: self.manager.slots)
    def close(self, next_one: bool) -> None:
        """A turn ends with its batch; the ledger's own checks raise if a group were past its bound."""
        ledger = self.manager.ledger
        self._sample_a_batch()
        ledger.take()
        self.manager.slots = 0
        ledger.mark_trained()
        ledger.seal()
        ledger.announce()
        self.trained += self.settings.batch_groups
        if next_one:
            self.open()

    @rule()
    @precondition(lambda self: not self.manager.slots)
    def resume_from_a_checkpoint(self) -> None:
        """Every group keeps its start, so that what was interrupted goes on before what is newer."""
        old = self.manager
        snapshot = json.loads(json.dumps(old.ledger.snapshot()))
        ledger = SampleLedger.restore(snapshot, self.settings, policy=Turns())
        self.manager = PromptManager(ledger, old.group_size, self.slots)
        self.manager.open()
        self.manager.slots = 0
        for group in ledger.in_state(GroupState.RUNNING):
            known = old.ledger.find(group.id)
            assert known is not None and known.start == group.start
            states = [old.state(Trajectory(group.id, index)) for index in range(old.group_size)]
            # What ran waits for a slot: nothing is under way in a process that has just begun.
            pending = TrajectoryState.PENDING
            self.manager.adopt(group, [pending if state is TrajectoryState.RUNNING else state for state in states])

    @invariant()
    def the_promises_hold(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, ledger = self.manager, self.manager.ledger
        ledger.check_identity()
        counts, in_ledger = manager.counts(), ledger.counts()
        running = self._in_state(TrajectoryState.RUNNING)
        assert manager.running == len(running) <= self.slots
        assert manager.generating == counts.running_trajectories == (len(running) if manager.slots else 0)
        assert counts.interrupted_trajectories == (0 if manager.slots else len(running))
        groups = [
            {manager.state(Trajectory(group.id, index)) for index in range(manager.group_size)}
            for group in ledger.in_state(GroupState.RUNNING)
        ]
        run, wait = TrajectoryState.RUNNING, TrajectoryState.PENDING
        assert counts.interrupted == (0 if manager.slots else sum(run in states for states in groups))
        assert counts.pending == sum(wait in states and run not in states for states in groups)
        assert in_ledger.live <= (1 + self.settings.pipeline_depth) * self.settings.batch_groups
        assert ledger.staleness.max <= self.settings.max_staleness
        assert in_ledger.trained == self.trained


TurnsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestTurns = TurnsMachine.TestCase


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_turns_never_come_to_a_stop(bound: int) -> None:
    """Whatever is interrupted how often, each turn ends with a batch once its trajectories do."""
    manager = new_manager(batch=2, depth=bound, bound=bound, size=2, slots=3)
    issued = 0
    manager.open()
    for turn in range(20):
        manager.slots = 3
        for _ in range(100):
            given = fill(manager, issued)
            issued = manager.ledger.counts().issued
            if manager.ledger.next_batch() is not None:
                break
            unfinished = [
                Trajectory(group.id, index)
                for group in manager.ledger.in_state(GroupState.RUNNING)
                for index in range(2)
                if manager.state(Trajectory(group.id, index)) is TrajectoryState.RUNNING
            ]
            assert given or unfinished
            # The newest first: the oldest groups, whose deadline is the nearest, are interrupted most often.
            last = unfinished[-1]
            manager.sampled(last)
            states = {manager.state(Trajectory(last.group_id, index)) for index in range(2)}
            if states == {TrajectoryState.SAMPLED}:
                group = manager.ledger.find(last.group_id)
                assert group is not None
                manager.complete(group.id, group.start)
        train(manager)
        assert manager.ledger.counts().trained == 2 * (turn + 1)

# SPDX-License-Identifier: Apache-2.0
"""Live groups are found as a scan over all of them would find them, and without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from counted_steps import steps_of
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import Group, GroupState, PromptRef
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.live_groups import LiveGroups
from recipe.async_engine.core.policy import OldestReady, WholeBatches

LIVE = (GroupState.RUNNING, GroupState.READY, GroupState.TAKEN)
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 12), st.sampled_from(LIVE), st.integers(0, 3), st.sampled_from([None, 0, 1]), st.booleans()
    ),
    max_size=60,
)


def by_age(group: Group) -> tuple[int, int]:
    return group.start, group.id


@given(CHANGES, st.integers(0, 5))
def test_every_answer_is_that_of_a_scan(changes: list[tuple[Any, ...]], count: int) -> None:
    live, scanned = LiveGroups(), dict[int, Group]()
    for group_id, state, start, batch, leaves in changes:
        if leaves and group_id in scanned:
            del scanned[group_id]
            live.remove(group_id)
        else:
            before = scanned.get(group_id)
            batch = batch if before is None else before.batch  # it keeps its batch
            group = Group(group_id, PromptRef(group_id, 0, "uid"), start, state, batch=batch)
            scanned[group_id] = group
            live.put(group)
        groups = [scanned[key] for key in sorted(scanned)]
        assert len(live) == len(groups)
        assert sorted(live.all(), key=lambda group: group.id) == groups
        for each in LIVE:
            of_state = [group for group in groups if group.state is each]
            oldest = sorted(of_state, key=by_age)[:count]
            assert live.in_state(each) == of_state
            assert live.count(each) == len(of_state)
            assert live.oldest(each, count) == oldest
            starts = [group.start for group in oldest]
            assert live.oldest_starts(each, count) == {start: starts.count(start) for start in starts}
        for number in (0, 1):
            of_batch = [group for group in groups if group.batch == number]
            assert live.of_batch(number) == of_batch
            assert live.places_taken(number) == len(of_batch)
            assert live.ready_of_batch(number) == sum(group.state is GroupState.READY for group in of_batch)


@pytest.mark.parametrize("policy", [OldestReady, WholeBatches])
def test_change_of_one_group_costs_the_same_whatever_is_live(policy: type[OldestReady]) -> None:
    def cost(live: int) -> int:
        settings = GateSettings(batch_groups=live // 2, batches_per_version=1, max_staleness=1, pipeline_depth=1)
        ledger = SampleLedger(settings, policy=policy())
        groups = [ledger.issue(PromptRef(index, 0, str(index))) for index in range(live)]
        for group in groups[3:]:
            ledger.mark_ready(group.id, 0)

        def changes() -> None:
            ledger.mark_ready(groups[0].id, 0)
            ledger.may_take()
            ledger.batch_possible(0)
            ledger.filter(groups[1].id, "uniform")
            ledger.counts()
            if ledger.can_issue():
                ledger.issue(PromptRef(live, 0, "next"))
            ledger.may_take()

        return steps_of(changes)

    cost(64)  # Python's own caches, of what a class is
    assert cost(2048) == cost(64)


def test_group_in_hand_stays_as_it_was() -> None:
    live = LiveGroups()
    group = Group(0, PromptRef(0, 0, "uid"), 2)
    live.put(group)
    live.put(replace(group, state=GroupState.READY))
    assert (group.state, live[0].state) == (GroupState.RUNNING, GroupState.READY)


def entries(part: Any) -> int:
    if isinstance(part, dict):
        return len(part) + sum(map(entries, part.values()))
    return len(part) if isinstance(part, (set, list)) else 0


def test_what_has_left_takes_no_memory() -> None:
    live, sizes = LiveGroups(), []
    for number in range(5):
        live.put(Group(number, PromptRef(number, 0, "uid"), number, GroupState.TAKEN, batch=number))
        live.remove(number)
        sizes.append(entries(vars(live)))
    assert set(sizes) == {sizes[0]}

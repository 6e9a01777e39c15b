# SPDX-License-Identifier: Apache-2.0
"""The sample ledger: states, identity, exactly-once across restarts, compact records."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.errors import LedgerError, LedgerIdentityError, SnapshotError
from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import Group, GroupState, PromptRef, PromptSet
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import OldestReady, WholeBatches

TWO_AHEAD = GateSettings(batch_groups=2, batches_per_version=1, max_staleness=2, pipeline_depth=2)


def issue(ledger: SampleLedger, count: int, first: int | None = None) -> list[Group]:
    begin = ledger.counts().issued if first is None else first
    return [ledger.issue(PromptRef(index, 0, f"uid-{index}")) for index in range(begin, begin + count)]


def ready(ledger: SampleLedger, groups: list[Group]) -> None:
    for group in groups:
        ledger.mark_ready(group.id, group.start)


def train_version(ledger: SampleLedger) -> list[int]:
    taken = [group.id for group in ledger.take()]
    ledger.mark_trained()
    ledger.seal()
    ledger.announce()
    return taken


def saved(ledger: SampleLedger, settings: GateSettings = TWO_AHEAD, **bounds: int) -> SampleLedger:
    return SampleLedger.restore(json.loads(json.dumps(ledger.snapshot())), settings, **bounds)


def test_group_goes_from_issue_to_trained_and_is_counted_once() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    groups = issue(ledger, 3)
    assert [(group.id, group.state, group.start, group.attempts) for group in groups] == [
        (0, GroupState.RUNNING, 0, 1),
        (1, GroupState.RUNNING, 0, 1),
        (2, GroupState.RUNNING, 0, 1),
    ]
    assert ledger.next_batch() is None
    ready(ledger, groups[:2])
    assert [group.id for group in ledger.next_batch() or []] == [0, 1]
    assert [group.state for group in ledger.take()] == [GroupState.TAKEN, GroupState.TAKEN]
    counts = ledger.counts()
    assert (counts.running, counts.ready, counts.taken, counts.live) == (1, 0, 2, 3)
    stats = ledger.mark_trained()
    assert (stats.total(), stats.sum, stats.max) == (2, 0, 0)
    counts = ledger.counts()
    assert (counts.issued, counts.trained, counts.filtered, counts.failed, counts.live) == (3, 2, 0, 0, 1)
    assert ledger.trained_prompts() == [[0, 0, 2]]
    assert ledger.seal() == ledger.announce() == 1


def test_oldest_start_goes_first_then_issue_order() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    first = issue(ledger, 2)
    late = issue(ledger, 2)
    ready(ledger, first)
    train_version(ledger)
    ledger.mark_ready(late[0].id, 1)
    fresh = issue(ledger, 1)
    ready(ledger, fresh)
    ledger.mark_ready(late[1].id, 0)
    assert [group.id for group in ledger.next_batch() or []] == [late[1].id, late[0].id]


def test_filtered_and_failed_groups_are_counted_by_reason_and_free_their_place() -> None:
    ledger = SampleLedger(GateSettings(1, 1, 0, 0))
    (group,) = issue(ledger, 1)
    assert not ledger.can_issue()
    filtered = ledger.filter(group.id, "constant_reward")
    assert (filtered.state, filtered.reason) == (GroupState.FILTERED, "constant_reward")
    (group,) = issue(ledger, 1)
    ready(ledger, [group])
    ledger.filter(group.id, "constant_reward")
    (group,) = issue(ledger, 1)
    assert ledger.fail(group.id, "reward_error").state is GroupState.FAILED
    counts = ledger.counts()
    assert counts.filtered_by_reason == {"constant_reward": 2}
    assert counts.failed_by_reason == {"reward_error": 1}
    assert (counts.issued, counts.filtered, counts.failed, counts.live) == (3, 2, 1, 0)
    assert ledger.can_issue()


def test_restart_begins_at_the_current_version_and_counts_attempts() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    groups = issue(ledger, 4)
    ready(ledger, groups[:2])
    train_version(ledger)
    again = ledger.restart(groups[2].id)
    assert (again.start, again.attempts, again.state) == (1, 2, GroupState.RUNNING)
    ledger.mark_ready(groups[3].id, 0)
    lost = ledger.restart(groups[3].id)
    assert (lost.start, lost.state) == (1, GroupState.RUNNING)
    ledger.check_identity()


@pytest.mark.parametrize("oldest", [-1, 2])
def test_oldest_version_of_a_ready_group_lies_between_start_and_current_version(oldest: int) -> None:
    ledger = SampleLedger(TWO_AHEAD)
    groups = issue(ledger, 3)
    ready(ledger, groups[:2])
    train_version(ledger)
    with pytest.raises(LedgerError, match=r"group 2 .* expected 0\.\.1"):
        ledger.mark_ready(groups[2].id, oldest)


@pytest.mark.parametrize(
    ("transition", "call"),
    [
        ("ready", lambda ledger, group_id: ledger.mark_ready(group_id, 0)),
        ("restart", lambda ledger, group_id: ledger.restart(group_id)),
        ("filter", lambda ledger, group_id: ledger.filter(group_id, "reason")),
        ("fail", lambda ledger, group_id: ledger.fail(group_id, "reason")),
    ],
)
def test_illegal_transition_names_group_state_and_transition(
    transition: str, call: Callable[[SampleLedger, int], Group]
) -> None:
    ledger = SampleLedger(TWO_AHEAD)
    groups = issue(ledger, 2)
    ready(ledger, groups)
    ledger.take()
    before = ledger.counts()
    with pytest.raises(LedgerError, match=f"group 1 is taken.*'{transition}'"):
        call(ledger, 1)
    assert ledger.counts() == before
    ledger.mark_trained()
    with pytest.raises(LedgerError, match=f"group 1 is trained, filtered or failed.*'{transition}'"):
        call(ledger, 1)
    with pytest.raises(LedgerError, match=f"group 7 is never issued.*'{transition}'"):
        call(ledger, 7)


def test_group_is_marked_ready_once() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    groups = issue(ledger, 1)
    ready(ledger, groups)
    with pytest.raises(LedgerError, match="group 0 is ready"):
        ready(ledger, groups)


def test_prompt_is_issued_once_per_epoch_whatever_became_of_it() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    (group,) = issue(ledger, 1)
    with pytest.raises(LedgerError, match="prompt 0 of epoch 0"):
        issue(ledger, 1, first=0)
    ledger.fail(group.id, "reward_error")
    with pytest.raises(LedgerError, match="already been issued"):
        issue(ledger, 1, first=0)
    assert ledger.issue(PromptRef(0, 1, "second epoch")).id == 1


def test_one_batch_is_leased_at_a_time() -> None:
    ledger = SampleLedger(GateSettings(1, 2, 1, 1))
    with pytest.raises(LedgerError, match="no batch of version 0 can be taken"):
        ledger.take()
    with pytest.raises(LedgerError, match="no batch is leased"):
        ledger.mark_trained()
    ready(ledger, issue(ledger, 2))
    ledger.take()
    with pytest.raises(LedgerError, match=r"still holds groups \[0\]"):
        ledger.take()
    ledger.mark_trained()
    ledger.take()
    with pytest.raises(LedgerError, match="cannot be made yet: the trainer holds"):
        ledger.seal()
        ledger.announce()


def test_nothing_is_issued_past_the_target_or_the_issue_limit() -> None:
    ledger = SampleLedger(TWO_AHEAD, target_groups=4)
    groups = issue(ledger, 4)
    assert not ledger.can_issue()
    with pytest.raises(LedgerError, match="0 of 4 groups trained"):
        issue(ledger, 1)
    ledger.filter(groups[0].id, "constant_reward")
    assert ledger.can_issue()  # a filtered group has to be replaced, or the target is never reached
    limited = SampleLedger(TWO_AHEAD, issue_limit=1)
    issue(limited, 1)
    assert not limited.can_issue()


def test_batch_is_possible_while_enough_prompts_are_left() -> None:
    ledger = SampleLedger(TWO_AHEAD, target_groups=4, issue_limit=3)
    assert ledger.batch_possible(prompts_left=2)
    assert not ledger.batch_possible(prompts_left=1)
    ready(ledger, issue(ledger, 2))
    assert ledger.batch_possible(prompts_left=0)
    ledger.take()
    assert not ledger.batch_possible(prompts_left=10)  # one more may be issued, a batch needs two
    assert [group.id for group in ledger.leased()] == [0, 1]


def test_staleness_is_recorded_exactly() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    assert (ledger.staleness.max, ledger.staleness.sum, ledger.staleness.mean) == (0, 0, 0.0)
    ready(ledger, issue(ledger, 6))
    seen = [train_version(ledger) for _ in range(3)]
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert ledger.staleness == {0: 2, 1: 2, 2: 2}
    assert (ledger.staleness.max, ledger.staleness.sum, ledger.staleness.mean) == (2, 6, 1.0)


def test_restored_groups_keep_their_states_and_starts() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    groups = issue(ledger, 6)
    ready(ledger, groups[:3])
    train_version(ledger)
    restored = saved(ledger)
    assert restored.version == 1
    assert [(g.id, g.start) for g in restored.in_state(GroupState.READY)] == [(2, 0)]
    assert [(g.id, g.start) for g in restored.in_state(GroupState.RUNNING)] == [(3, 0), (4, 0), (5, 0)]
    assert restored.find(3) == Group(3, PromptRef(3, 0, "uid-3"), 0, GroupState.RUNNING)
    assert restored.counts() == ledger.counts()
    assert restored.staleness == ledger.staleness
    with pytest.raises(LedgerError, match="already been issued"):
        issue(restored, 1, first=0)
    assert issue(restored, 1)[0].id == 6


def test_leased_batch_is_ready_again_after_a_restore_and_trained_once() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    ready(ledger, issue(ledger, 4))
    ledger.take()
    restored = saved(ledger)
    assert restored.leased() == []
    assert restored.batches_left == 1
    assert [train_version(restored) for _ in range(2)] == [[0, 1], [2, 3]]
    assert restored.trained_prompts() == [[0, 0, 4]]


def test_batch_trained_before_the_snapshot_is_not_trained_again() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    ready(ledger, issue(ledger, 4))
    ledger.take()
    ledger.mark_trained()
    restored = saved(ledger)
    assert restored.batches_left == 0  # the version is trained; its publication is due
    restored.seal()
    restored.announce()
    assert train_version(restored) == [2, 3]
    assert restored.trained_prompts() == [[0, 0, 4]]


def test_snapshot_that_a_tighter_bound_does_not_fit_is_refused() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    ready(ledger, issue(ledger, 6))
    train_version(ledger)
    with pytest.raises(SnapshotError, match="max_staleness = 1"):
        saved(ledger, GateSettings(2, 1, 1, 1))
    assert saved(ledger, GateSettings(2, 1, 3, 0.5)).counts() == ledger.counts()


def test_snapshot_does_not_grow_with_the_trained_groups() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    sizes = []
    for _ in range(200):
        ready(ledger, issue(ledger, 2))
        train_version(ledger)
        sizes.append(len(json.dumps(ledger.snapshot())))
    assert ledger.counts().trained == 400
    assert sizes[-1] - sizes[0] < 20  # only the digits of the counts


def test_tampered_ledger_is_noticed() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    ready(ledger, issue(ledger, 2))
    snapshot = ledger.snapshot()
    snapshot["trained"] += 1
    with pytest.raises(LedgerIdentityError, match="issued = trained"):
        SampleLedger.restore(snapshot, TWO_AHEAD)
    assert issubclass(LedgerIdentityError, LedgerError)


def test_books_that_do_not_agree_are_noticed_at_the_step() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    ready(ledger, issue(ledger, 2))
    ledger.take()
    ledger.staleness[0] += 1
    with pytest.raises(LedgerIdentityError, match="every trained group's staleness is recorded"):
        ledger.mark_trained()


def test_group_counted_in_another_state_is_noticed() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    group = issue(ledger, 2)[0]
    ledger._live._groups[group.id] = replace(group, start=1)
    with pytest.raises(LedgerIdentityError, match="the ledger counts live groups as"):
        ledger.check_identity()


def test_prompt_set_equals_a_set_of_pairs() -> None:
    rng = random.Random(0)
    compact, plain = PromptSet(), set()
    for _ in range(2000):
        key = (rng.randrange(3), rng.randrange(200))
        assert (key in compact) == (key in plain)
        assert compact.add(key) == (key not in plain)
        plain.add(key)
        assert len(compact) == len(plain)
    rows = compact.to_rows()
    assert {(epoch, index) for epoch, first, end in rows for index in range(first, end)} == plain
    for (epoch, _, end), (next_epoch, next_first, _) in pairwise(rows):
        assert (epoch, end) < (next_epoch, next_first)  # sorted, disjoint, merged where they touch
    assert PromptSet(rows).to_rows() == rows


def test_prompt_set_of_a_whole_epoch_is_one_run() -> None:
    compact = PromptSet()
    order = list(range(500))
    random.Random(1).shuffle(order)
    for index in order:
        compact.add((0, index))
    assert compact.to_rows() == [[0, 0, 500]]


def test_resume_with_fewer_prompts_than_were_issued_still_trains_the_batch_that_is_there() -> None:
    ledger = SampleLedger(TWO_AHEAD)
    ready(ledger, issue(ledger, 6))
    resumed = SampleLedger.restore(ledger.snapshot(), TWO_AHEAD, issue_limit=1)
    assert resumed.batch_possible(prompts_left=100)


@given(data=st.data(), whole=st.booleans())
def test_batch_that_is_returned_leaves_the_ledger_as_before_its_take(data: st.DataObject, whole: bool) -> None:
    """Groups may be issued, completed and given up between the take and the return."""
    b = data.draw(st.integers(1, 3))
    k, bound = (
        (1, data.draw(st.integers(0, 1))) if whole else (data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2)))
    )
    ledger = SampleLedger(GateSettings(b, k, bound, bound), policy=WholeBatches() if whole else OldestReady())
    prompts = (PromptRef(index, 0, str(index)) for index in range(10_000))
    for _ in range(data.draw(st.integers(0, 60))):
        running = ledger.in_state(GroupState.RUNNING)
        step = data.draw(st.sampled_from(["issue", "ready", "fail", "take", "publish"]))
        if step == "issue" and ledger.can_issue():
            ledger.issue(next(prompts))
        elif step == "ready" and running:
            ledger.mark_ready(running[0].id, running[0].start)
        elif step == "fail" and running:
            ledger.fail(running[-1].id, "odd")
        elif step == "publish" and ledger.batches_left == 0 and not ledger.leased():
            ledger.seal()
            ledger.announce()
        elif step == "take" and ledger.next_batch() is not None:
            batch = {group.id for group in ledger.take()}
            while data.draw(st.booleans()) and ledger.can_issue():
                ledger.issue(next(prompts))
            if data.draw(st.booleans()):
                ledger.return_batch()
                ledger.check_identity()
                assert batch <= {group.id for group in ledger.in_state(GroupState.READY)}
                lost = data.draw(st.sampled_from(sorted(batch)))
                assert ledger.restart(lost).start == ledger.version
                ledger.mark_ready(lost, ledger.version)
            else:
                ledger.mark_trained()
        ledger.check_identity()
    assert ledger.staleness.max <= bound


def test_nothing_is_returned_where_nothing_is_leased() -> None:
    with pytest.raises(LedgerError, match="none can be returned"):
        SampleLedger(GateSettings(1, 1, 0, 0)).return_batch()

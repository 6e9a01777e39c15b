# SPDX-License-Identifier: Apache-2.0
"""The lending policy: when the trainer's accelerators generate, and when they are called back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.lending import Average, Demand, LendingPolicy, PlaceMeter, Places

PLACES = Places(standalone=64, hybrid=64, waiting=64)
DEMAND = Demand(batch_groups=16, ready=0, sampled=0, spent=0.0, may_take=False, most_live=64)


def policy(
    wake_s: float = 2.0, sleep_s: float = 1.0, train_s: float = 10.0, group_place_s: float = 64.0
) -> LendingPolicy:
    """A policy that has measured these."""
    measured = LendingPolicy()
    measured.woke(100.0)
    measured.woke(wake_s)
    for average, value in (
        (measured.sleep_s, sleep_s),
        (measured.train_s, train_s),
        (measured.group_place_s, group_place_s),
    ):
        average.add(value)
    return measured


def test_an_average_forgets() -> None:
    average = Average()
    assert average.value is None
    for _ in range(50):
        average.add(1.0)
    for _ in range(50):
        average.add(3.0)
    assert average.value == pytest.approx(3.0, abs=1e-3)


def test_accelerators_are_lent_where_a_switch_is_worth_its_time() -> None:
    # 16 groups at one a second take 16 s alone; with as many places again 2 + 14 / 2 + 1 = 10 s.
    assert policy().lends(PLACES, DEMAND)
    # 4 groups take as long, 4 s alone and 2 + 2 / 2 + 1 s with a switch, in which one group more is generated.
    assert policy().lends(PLACES, replace(DEMAND, ready=12))
    # 2 groups take 2 s alone, and 2 + 0 + 1 = 3 s with a switch, in which one group more is generated.
    assert not policy().lends(PLACES, replace(DEMAND, ready=14))


def test_a_long_switch_is_not_made() -> None:
    assert not policy(wake_s=30.0).lends(PLACES, DEMAND)


def test_while_rewards_are_computed_later_groups_generate() -> None:
    waits = replace(DEMAND, sampled=16)
    quick, slow = policy(), policy()
    quick.reward_s.add(0.0)
    slow.reward_s.add(30.0)
    assert not quick.lends(PLACES, waits)
    assert slow.lends(PLACES, waits)
    assert not slow.lends(replace(PLACES, waiting=0), waits)


def test_work_that_is_half_done_shortens_the_wait() -> None:
    asked = replace(DEMAND, ready=12)
    assert policy().lends(PLACES, asked)
    assert not policy().lends(PLACES, replace(asked, spent=4 * 64.0))


def test_without_standalone_replicas_accelerators_are_always_lent() -> None:
    alone = replace(PLACES, standalone=0)
    assert policy(wake_s=1e6).lends(alone, DEMAND)


def test_nothing_is_known_before_the_first_switch() -> None:
    assert LendingPolicy().lends(PLACES, DEMAND)
    assert LendingPolicy().batches(PLACES, DEMAND) == 1


def test_accelerators_are_called_back_when_nothing_is_left_for_them() -> None:
    over = replace(DEMAND, may_take=True, ready=16)
    long_switch = policy(wake_s=20.0)
    assert not long_switch.calls_back(replace(PLACES, hybrid_taken=64), over)
    assert not long_switch.calls_back(replace(PLACES, waiting=0, hybrid_taken=40), over)
    assert long_switch.calls_back(replace(PLACES, waiting=0, hybrid_taken=8), over)


places = st.builds(
    Places,
    standalone=st.integers(0, 4096),
    hybrid=st.integers(1, 4096),
    waiting=st.integers(0, 10_000),
    hybrid_taken=st.integers(0, 4096),
)
demands = st.builds(
    Demand,
    batch_groups=st.integers(1, 512),
    ready=st.integers(0, 4096),
    sampled=st.integers(0, 512),
    spent=st.floats(0, 1e7),
    may_take=st.booleans(),
    most_live=st.integers(1, 4096),
)
policies = st.builds(
    policy,
    wake_s=st.floats(0, 1e4),
    sleep_s=st.floats(0, 1e4),
    train_s=st.floats(0, 1e5),
    group_place_s=st.floats(0, 1e6),
)


@given(policies, places, demands)
def test_nothing_is_lent_that_nobody_would_use(asked: LendingPolicy, there: Places, wanted: Demand) -> None:
    if asked.lends(there, wanted):
        assert there.waiting > 0
        assert not wanted.may_take


@given(policies, places, demands)
def test_nothing_is_called_back_for_no_batch(asked: LendingPolicy, there: Places, wanted: Demand) -> None:
    if asked.calls_back(there, wanted):
        assert wanted.may_take


@given(policies, places, demands)
def test_accelerators_come_back_once_their_places_are_empty(
    asked: LendingPolicy, there: Places, wanted: Demand
) -> None:
    assert asked.calls_back(replace(there, waiting=0, hybrid_taken=0), replace(wanted, may_take=True))


@given(policies, places, demands)
def test_a_switch_collects_no_more_than_the_gate_allows(asked: LendingPolicy, there: Places, wanted: Demand) -> None:
    batches = asked.batches(there, wanted)
    assert batches == 1 or (batches + 1) * wanted.batch_groups <= wanted.most_live


@given(policies, places, demands, st.integers(1, 512))
def test_more_that_is_ready_never_makes_lending_worth_more(
    asked: LendingPolicy, there: Places, wanted: Demand, more: int
) -> None:
    if not asked.lends(there, wanted):
        assert not asked.lends(there, replace(wanted, ready=wanted.ready + more))


def test_more_batches_are_collected_where_a_switch_is_longer() -> None:
    wanted = replace(DEMAND, most_live=16 * 100)
    # Places make 1 and 2 groups a second, so a step takes 10 + (16 - 10) / 2 = 13 s, of which 5% are 0.65 s. During a
    # switch of 1.1, 3 or 21 s standalone places still make half of the groups.
    assert [policy(wake_s=wake).batches(PLACES, wanted) for wake in (0.1, 2.0, 20.0)] == [1, 3, 17]


def test_the_first_switches_measure_and_the_very_first_is_forgotten() -> None:
    measured = LendingPolicy()
    measured.group_place_s.add(64.0)
    for seconds in (1000.0, 1000.0):
        assert measured.lends(PLACES, DEMAND)
        measured.woke(seconds)
    assert not measured.lends(PLACES, DEMAND)
    quick = LendingPolicy()
    quick.group_place_s.add(64.0)
    quick.woke(1000.0)
    quick.woke(0.5)
    assert quick.lends(PLACES, DEMAND) and quick.wake_s.value == 0.5


class Trajectory:
    """A trajectory as an independent count sees it: its group, and the place-seconds it has had."""

    def __init__(self, group: int, began: float) -> None:
        self.group, self.began, self.spent = group, began, 0.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "leave", "fail", "sampled", "end", "places"]),
            st.integers(0, 3),
            st.floats(0, 10),
            st.integers(1, 6),
        ),
        max_size=60,
    )
)
def test_place_seconds_are_those_of_a_recount(steps: list[tuple[str, int, float, int]]) -> None:
    now, places = 0.0, 4
    meter = PlaceMeter(lambda: now, places)
    running: list[Trajectory] = []
    ended: dict[int, float] = {}
    sampled: set[int] = set()
    for what, group, seconds, count in steps:
        for each in running:
            each.spent += seconds * min(1.0, places / len(running))
        now += seconds
        if what == "places":
            places = count
            meter.use(places)
        elif what == "begin":
            running.append(Trajectory(group, meter.begin()))
        elif what in ("leave", "fail") and running:
            each = running.pop(group % len(running))
            meter.leave(each.began, each.group if what == "leave" else None)
            if what == "leave":
                ended[each.group] = ended.get(each.group, 0.0) + each.spent
                sampled.discard(each.group)
        elif what == "sampled":
            meter.sampled(group)
            sampled.add(group)
        elif what == "end":
            assert meter.end(group) == pytest.approx(ended.pop(group, 0.0), abs=1e-6)
            sampled.discard(group)
        spent = sum(ended[each] for each in ended.keys() - sampled) + sum(each.spent for each in running)
        assert meter.spent == pytest.approx(spent, abs=1e-6)

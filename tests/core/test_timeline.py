# SPDX-License-Identifier: Apache-2.0
"""Where the time went: exclusive phases, rollout idleness and occupancy, on a clock that the test turns."""

from __future__ import annotations

import pytest

from recipe.async_engine.record.timeline import IDLE_PHASE, Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_shares_add_up_to_one_and_name_every_phase(clock: Clock) -> None:
    timeline = Timeline(clock)
    clock.now += 1
    with timeline.phase("wait"):
        clock.now += 2
    with timeline.phase("train"):
        clock.now += 5
    assert timeline.shares() == {IDLE_PHASE: 1 / 8, "wait": 2 / 8, "train": 5 / 8}
    assert timeline.trainer_wait_share == 0.25


def test_inner_phase_suspends_the_outer_one(clock: Clock) -> None:
    timeline = Timeline(clock)
    with timeline.phase("sync"):
        clock.now += 1
        with timeline.phase("validate"):
            clock.now += 3
        clock.now += 2
    assert timeline.shares() == {"sync": 3 / 6, "validate": 3 / 6}


def test_open_phase_counts_up_to_now(clock: Clock) -> None:
    timeline = Timeline(clock)
    with timeline.phase("wait"):
        clock.now += 4
        assert timeline.trainer_wait_share == 1.0


def test_phase_that_raises_is_left(clock: Clock) -> None:
    timeline = Timeline(clock)
    with pytest.raises(ValueError, match="step failed"), timeline.phase("train"):
        clock.now += 1
        raise ValueError("step failed")
    clock.now += 3
    assert timeline.shares() == {"train": 1 / 4, IDLE_PHASE: 3 / 4}


def test_rollout_is_idle_only_while_nothing_generates(clock: Clock) -> None:
    timeline = Timeline(clock, rollout_capacity=4)
    clock.now += 1
    timeline.rollout.set(running=4)
    clock.now += 2
    timeline.rollout.set(running=1)
    clock.now += 4
    timeline.rollout.set(running=0)
    clock.now += 1
    assert timeline.rollout.idle_share == 2 / 8
    assert timeline.rollout.occupancy == (2 * 4 + 4 * 1) / (8 * 4)


def test_the_use_of_a_part_of_the_time_is_a_difference(clock: Clock) -> None:
    rollout = Timeline(clock, rollout_capacity=0).rollout
    clock.now += 5
    rollout.set(capacity=4)
    before = rollout.offered, rollout.used
    rollout.set(running=3)
    clock.now += 2
    rollout.set(running=0)
    rollout.set(capacity=0)
    clock.now += 7
    rollout.advance()
    assert (rollout.offered - before[0], rollout.used - before[1]) == (8, 6)


def test_idle_time_is_weighted_by_the_capacity_of_its_moment(clock: Clock) -> None:
    timeline = Timeline(clock, rollout_capacity=4)
    clock.now += 1
    timeline.rollout.set(capacity=1)  # three of four replicas are lost
    timeline.rollout.set(running=3)
    clock.now += 4
    assert timeline.rollout.idle_share == 4 / 8
    assert timeline.rollout.occupancy == 4 / 8  # waiting trajectories beyond the capacity do not count
    timeline.rollout.set(capacity=0)
    clock.now += 100
    assert timeline.rollout.idle_share == 4 / 8


def test_restart_leaves_the_start_up_out(clock: Clock) -> None:
    timeline = Timeline(clock)
    with timeline.phase("wait"):
        clock.now += 50
        timeline.restart()
        clock.now += 1
    timeline.rollout.set(running=1)
    clock.now += 3
    assert timeline.shares() == {"wait": 1 / 4, IDLE_PHASE: 3 / 4}
    assert timeline.rollout.idle_share == 0.25


def test_nothing_counts_after_the_stop(clock: Clock) -> None:
    timeline = Timeline(clock)
    with timeline.phase("train"):
        clock.now += 2
        timeline.rollout.set(running=1)
        clock.now += 2
        timeline.stop()
        clock.now += 9
    clock.now += 9
    timeline.stop()
    clock.now += 9
    assert timeline.shares() == {"train": 1.0}
    assert timeline.rollout.idle_share == 0.5


def test_notes_say_what_began_or_ended_and_how_long_ago(clock: Clock) -> None:
    timeline = Timeline(clock)
    clock.now += 1
    timeline.note("answer")
    clock.now += 3
    assert timeline.silent_s == 3
    with timeline.phase("train"):
        assert timeline.silent_s == 0
        clock.now += 2
    clock.now += 1
    timeline.note("answer")
    clock.now += 4
    assert timeline.silent_s == 4
    assert timeline.notes() == [
        ("answer", 4),
        ("trainer: train ends", 5),
        ("trainer: train begins", 7),
        ("the run began", 11),
    ]


def test_lane_has_the_phases_from_the_restart_on(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.lane.take()
    with timeline.phase("sync"):
        clock.now += 5
        timeline.restart()
        clock.now += 1
        with timeline.phase("train"):
            clock.now += 2
    clock.now += 3
    timeline.stop()
    assert timeline.end == clock.now
    assert [(span.what, span.end - span.start) for span in timeline.lane.take()] == [
        ("start_up", 5),
        ("sync", 1),
        ("train", 2),
        (IDLE_PHASE, 3),
    ]
    timeline.rollout.set(scoring=1, waiting=True)
    assert timeline.rollout.waits_for_rewards
    timeline.rollout.set(running=1)
    assert not timeline.rollout.waits_for_rewards


def test_no_time_gives_no_shares(clock: Clock) -> None:
    timeline = Timeline(clock)
    assert timeline.shares() == {}
    assert timeline.trainer_wait_share == 0.0
    assert timeline.rollout.idle_share == 0.0
    assert timeline.rollout.occupancy == 0.0


def test_reward_seconds_are_exposed_only_where_nothing_else_goes_on(clock: Clock) -> None:
    rollout = Timeline(clock).rollout
    assert (rollout.scored, rollout.hidden_share) == (0.0, 1.0)
    rollout.set(running=2)
    clock.now += 5
    rollout.set(scoring=1, running=1, waiting=True)
    clock.now += 4  # the other one generates
    assert (rollout.hidden_share, rollout.scored) == (1.0, 4.0)
    rollout.set(scoring=2, running=0)
    clock.now += 3  # two are scored, and the trainer waits for them
    assert (rollout.hidden_share, rollout.scored) == (pytest.approx(0.4), 10.0)
    rollout.set(scoring=1, waiting=False)
    clock.now += 10  # the trainer trains
    assert (rollout.hidden_share, rollout.scored) == (pytest.approx(0.7), 20.0)
    rollout.set(scoring=0)
    clock.now += 100
    rollout.advance()
    assert (rollout.scored, rollout.scoring) == (20.0, 0)

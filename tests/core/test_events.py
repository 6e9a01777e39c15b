# SPDX-License-Identifier: Apache-2.0
"""Parts of a run leave spans without gaps, whose shares add up, and clocks of other processes are followed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.record.activity import AwayActivity, EngineActivity, ToolTime, Work
from recipe.async_engine.record.events import EMPTY, NOWHERE, Away, Class, Exchange, Lane, OtherClock, Span


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def seconds(spans: list[Span]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        sums[span.what] += (span.end - span.start) * span.share
    return {what: pytest.approx(value) for what, value in sums.items() if value}


def serving(clock: Clock, places: int = 4) -> EngineActivity:
    engine = EngineActivity(clock, places)
    engine.open()
    engine.take()
    return engine


def test_lane_leaves_what_it_did_from_the_first_question_on() -> None:
    clock = Clock()
    lane = Lane(clock, "waits")
    clock.now += 5
    assert lane.take() == []
    clock.now += 1
    lane.turn_to("works")
    lane.turn_to("works")
    clock.now += 2
    assert lane.take() == [Span("waits", 55, 56), Span("works", 56, 58)]
    assert lane.take() == []
    clock.now += 1
    assert lane.take() == [Span("works", 58, 59)]


def test_places_of_a_busy_engine_are_in_the_class_of_their_request_and_the_others_idle() -> None:
    clock = Clock()
    engine = serving(clock)
    engine.expect("a", Work.NEW)
    engine.expect("b", Work.AGAIN)
    clock.now += 3
    engine.enter("a")
    clock.now += 2
    engine.output("a", 1)
    engine.enter("b")
    clock.now += 4
    engine.output("b", 1)
    clock.now += 2
    engine.leave("a")
    engine.leave("b")
    clock.now += 1
    spans = engine.take()
    assert seconds(spans) == {
        EMPTY: 4,
        Class.PREFILL: 2 / 4,
        Class.DECODING: (4 + 2 + 2) / 4,
        Class.RE_PREFILL: 4 / 4,
        Class.IDLE_PLACES: (2 * 3 + 6 * 2) / 4,
    }


@pytest.mark.parametrize(
    ("work", "first", "then"),
    [
        (Work.NEW, Class.PREFILL, Class.DECODING),
        (Work.AGAIN, Class.RE_PREFILL, Class.DECODING),
        (Work.RETRY, Class.RETRY, Class.RETRY),
        (Work.VALIDATION, Class.VALIDATING, Class.VALIDATING),
        (Work.OTHER, Class.PREFILL, Class.DECODING),
    ],
)
def test_what_a_request_is_for_decides_its_class(work: Work, first: Class, then: Class) -> None:
    clock = Clock()
    engine = serving(clock, places=1)
    engine.expect("a", work)
    engine.enter("a")
    clock.now += 1
    engine.output("a", 1)
    clock.now += 2
    engine.leave("a")
    assert [span.what for span in engine.take()] == ([first, then] if first is not then else [first])


def test_engine_that_holds_its_requests_is_closed_and_computes_them_again() -> None:
    clock = Clock()
    engine = serving(clock, places=1)
    engine.expect("a", Work.NEW)
    engine.enter("a")
    engine.output("a", 3)
    engine.close(Class.WAIT_WEIGHTS)
    clock.now += 2
    engine.recompute(["a", "gone"])
    engine.open()
    clock.now += 1
    engine.output("a", 4)
    clock.now += 5
    assert seconds(engine.take()) == {Class.WAIT_WEIGHTS: 2, Class.RE_PREFILL: 1, Class.DECODING: 5}


def test_request_that_leaves_another_behind_ends_no_span() -> None:
    clock = Clock()
    engine = serving(clock, places=2)
    for name in ("a", "b"):
        engine.enter(name)
    clock.now += 2
    engine.leave("a")
    clock.now += 2
    assert engine.take() == [
        Span(Class.PREFILL, 50, 54, pytest.approx((2 + 2 / 2) / 4)),
        Span(Class.IDLE_PLACES, 50, 54, pytest.approx(2 / 2 / 4)),
    ]


def test_span_without_a_share_is_of_the_whole_device() -> None:
    assert seconds([Span("waits", 3, 5)]) == {"waits": 2}


def test_requests_beyond_the_places_share_them() -> None:
    clock = Clock()
    engine = serving(clock, places=2)
    for name, work in (("a", Work.NEW), ("b", Work.NEW), ("c", Work.VALIDATION)):
        engine.expect(name, work)
        engine.enter(name)
    clock.now += 3
    assert seconds(engine.take()) == {Class.PREFILL: 2, Class.VALIDATING: 1}


def test_requests_that_wait_at_a_full_engine_are_in_no_place() -> None:
    clock = Clock()
    engine = serving(clock, places=2)
    for name, work in (("a", Work.NEW), ("b", Work.NEW), ("c", Work.NEW), ("d", Work.AGAIN)):
        engine.expect(name, work)
        engine.enter(name)
    engine.output("a", 1)
    clock.now += 3
    engine.output("b", 1)
    clock.now += 5
    engine.leave("a")
    engine.leave("c")
    clock.now += 2
    assert seconds(engine.take()) == {
        Class.DECODING: pytest.approx(3 / 2 + 5 + 2 / 2),
        Class.PREFILL: pytest.approx(3 / 2 * 2 / 3),
        Class.RE_PREFILL: pytest.approx(3 / 2 / 3 + 2 / 2),
    }


def test_tokens_that_are_trained_are_counted_and_no_others() -> None:
    clock = Clock()
    engine = serving(clock)
    for name, work in (("a", Work.NEW), ("b", Work.RETRY), ("v", Work.VALIDATION), ("http", Work.OTHER)):
        if work is not Work.OTHER:
            engine.expect(name, work)
        engine.enter(name)
        engine.output(name, 2)
        engine.output(name, 5)
    assert (engine.sampled, engine.under_way) == (10, 10)
    engine.enter("cut")
    engine.output("cut", 0)
    engine.leave("cut")
    clock.now += 1
    # A first token is of what came before it.
    tokens = {span.what: span.tokens for span in engine.take() if span.tokens}
    assert tokens == {Class.PREFILL: 2, Class.DECODING: 8, Class.RETRY: 5, Class.VALIDATING: 5}
    engine.leave("a")
    engine.answer("a", 5)
    engine.forget("a")
    engine.leave("v")
    engine.answer("v", 5)
    engine.leave("b")
    assert (engine.sampled, engine.answered, engine.under_way) == (10, 5, 0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "output", "leave", "close", "open", "take"]), st.floats(0, 10)), max_size=60
)


@given(STEPS, st.integers(1, 3))
def test_an_engines_spans_cover_its_time_once_whatever_happens(steps: list[tuple[str, float]], places: int) -> None:
    clock = Clock()
    engine = serving(clock, places)
    present: list[str] = []
    spans: list[Span] = []
    sampled: Counter[str] = Counter()
    for number, (step, wait) in enumerate(steps):
        clock.now += wait
        if step == "enter":
            engine.expect(str(number), list(Work)[number % len(Work)])
            engine.enter(str(number))
            present.append(str(number))
        elif step == "output" and present:
            engine.output(present[0], number + 1)
            sampled[present[0]] = number + 1
        elif step == "leave" and present:
            engine.leave(present.pop(0))
        elif step == "close":
            engine.close(Class.WAIT_WEIGHTS)
        elif step == "open":
            engine.open()
        else:
            spans += engine.take()
    clock.now += 1
    spans += engine.take()
    assert sum(span.tokens or 0 for span in spans) == sampled.total()
    life = clock.now - 50.0
    assert sum((span.end - span.start) * span.share for span in spans) == pytest.approx(life, abs=1e-9)
    shares: defaultdict[tuple[float, float], float] = defaultdict(float)
    for span in spans:
        shares[span.start, span.end] += span.share
    assert all(share == pytest.approx(1.0) for share in shares.values())
    stretches = sorted(shares)
    assert all(earlier[1] == later[0] for earlier, later in pairwise(stretches))


def test_another_clock_is_corrected_evenly_between_two_exchanges() -> None:
    clock = OtherClock(Exchange(0.0, 100.0, 0.0))
    clock.note(Exchange(10.0, 104.0, 10.0))
    assert [clock.here(theirs) for theirs in (99.0, 100.0, 101.0, 103.0, 104.0, 106.0)] == [-1, 0, 2.5, 7.5, 10, 12]


@given(
    offset=st.floats(-1e6, 1e6),
    pace=st.floats(-1e-4, 1e-4),
    trips=st.lists(st.tuples(st.floats(0.5, 30), st.floats(0, 0.4), st.floats(0, 0.4)), min_size=1, max_size=30),
)
def test_another_clock_is_followed_within_a_round_trip(
    offset: float, pace: float, trips: list[tuple[float, float, float]]
) -> None:
    """Whatever the difference of the clocks, though one be a little faster."""

    def theirs(here: float) -> float:
        return offset + here * (1 + pace)

    now, clock, before, last = 0.0, None, 0.0, 0.0
    for pause, there, back in trips:
        now += pause
        exchange = Exchange(now, theirs(now + there), now + there + back)
        now += there + back
        if clock is None:
            clock = OtherClock(exchange)
        else:
            clock.note(exchange)
            # What was mapped before is where it was: spans follow each other without a gap.
            assert clock.here(before) == pytest.approx(last, abs=1e-6)
        before, last = exchange.answered, clock.here(exchange.answered)
        assert exchange.asked - 1e-6 <= last <= exchange.came + 1e-6


def test_agents_say_what_their_trajectories_are_at_when_at_no_engine() -> None:
    clock = Clock()
    activity = AwayActivity(clock)
    activity.lane.take()
    first, second = ToolTime(activity), ToolTime(activity)

    def after(seconds: float, *steps: Callable[[], None]) -> None:
        clock.now += seconds
        for step in steps:
            step()

    after(1, first.asks, second.asks)
    after(2, first.is_answered)
    # Of several requests at once only the last one's answer sends a trajectory to its tools.
    after(1, second.asks, second.is_answered)
    with activity.at(Away.REWARD):
        after(3, first.asks)
    after(1, second.is_answered)
    after(1, first.is_answered, first.leave, first.leave, second.leave)
    assert [(span.what, span.end - span.start) for span in activity.lane.take()] == [
        (NOWHERE, 3),
        (Away.TOOLS, 1),
        (f"{Away.TOOLS}+{Away.REWARD}", 3),
        (NOWHERE, 1),
        (Away.TOOLS, 1),
    ]
    # What follows the last answer is no tool.
    assert (first.seconds, second.seconds) == (4, 0)


def test_loop_whose_trajectories_end_with_their_first_answer_has_no_tools_until_one_goes_on() -> None:
    clock = Clock()
    activity = AwayActivity(clock)
    activity.lane.take()

    def answered(ends: bool) -> ToolTime:
        tools = activity.tool_time("loop")
        tools.asks()
        clock.now += 1
        tools.is_answered()
        clock.now += 1
        if ends:
            tools.end()
        return tools

    def spans() -> list[tuple[str, float]]:
        return [(span.what, span.end - span.start) for span in activity.lane.take()]

    # A trajectory that fails says nothing of the others.
    answered(ends=False).leave()
    answered(ends=True)
    assert spans() == [(NOWHERE, 1), (Away.TOOLS, 1), (NOWHERE, 1), (Away.TOOLS, 1)]
    answered(ends=True)
    goes_on = answered(ends=False)
    goes_on.asks()
    assert (spans(), goes_on.seconds) == ([(NOWHERE, 4)], 1)
    goes_on.is_answered()
    clock.now += 1
    goes_on.end()
    answered(ends=True)
    assert spans() == [(Away.TOOLS, 1), (NOWHERE, 1), (Away.TOOLS, 1)]


def test_tool_time_of_a_trajectory_that_nobody_records_is_none() -> None:
    tools = ToolTime()
    tools.asks()
    tools.is_answered()
    tools.leave()
    assert tools.seconds == 0


def test_spans_of_another_clock_keep_their_order() -> None:
    clock = OtherClock(Exchange(10.0, 1000.0, 10.2))
    clock.note(Exchange(12.0, 1001.0, 12.1))
    times = [clock.here(time) for time in (999.0, 1000.0, 1000.4, 1001.0, 1001.5)]
    assert times == sorted(times)
    assert times[1] == pytest.approx(10.1)
    assert times[3] == pytest.approx(12.0)

# SPDX-License-Identifier: Apache-2.0
"""Every second of a device is in one class, and the sums close, over records that a test writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.account import (
    BEGINS,
    EMPTY_FOR,
    ENDS,
    KINDS,
    PHASES,
    Account,
    Devices,
    TokenBooks,
    close,
)
from recipe.async_engine.core.events import EMPTY, LOG_PROBS, ROLLOUT, RUN, SCHEDULER, TRAINER, Class, Event, Why

APART = Devices({TRAINER: 2, ROLLOUT: 1, LOG_PROBS: 1})
SHARED = Devices({TRAINER: 2, ROLLOUT: 1}, shared=True)
ENGINE, OTHER = f"{ROLLOUT} 0", f"{ROLLOUT} 1"


def lane(name: str, *spans: tuple[str, float, float]) -> list[Event]:
    return [Event(name, what, start, end) for what, start, end in spans]


def seconds(account: Account, device: str) -> dict[str, float]:
    return {name: round(value, 9) for name, value in account.devices[device].seconds.items() if value > 1e-9}


def test_trainer_and_engine_are_accounted_side_by_side() -> None:
    events = [
        *lane(TRAINER, ("wait", 10, 14), ("update", 14, 18), ("sync", 18, 20)),
        *lane(SCHEDULER, (Why.GENERATING, 10, 12), (Why.REWARD, 12, 13), (Why.GATE, 13, 20)),
        *lane(ENGINE, (EMPTY, 9, 11)),
        Event(ENGINE, Class.DECODING, 11, 12, 0.25),
        Event(ENGINE, Class.IDLE_PLACES, 11, 12, 0.75),
        *lane(ENGINE, (EMPTY, 12, 20)),
    ]
    account = close(events, APART, 20.0)
    assert account.closes
    assert seconds(account, TRAINER) == {
        Class.START_UP: 10,
        Class.WAIT_BATCH: 3,
        Class.WAIT_REWARD: 1,
        Class.TRAINING: 4,
        Class.WAIT_WEIGHTS: 2,
    }
    assert seconds(account, ENGINE) == {
        Class.START_UP: 10,
        Class.WAIT_AGENTS: 1,
        Class.DECODING: 0.25,
        Class.IDLE_PLACES: 0.75,
        Class.WAIT_REWARD: 1,
        Class.WAIT_GATE: 7,
    }
    # Two accelerators train, one generates.
    assert account.total[Class.TRAINING] == 8
    assert sum(account.total.values()) == pytest.approx(3 * 20)


def test_shared_accelerators_are_the_engines_while_the_trainer_waits() -> None:
    events = [
        *lane(TRAINER, ("wait", 2, 6), ("update", 6, 9), ("validate", 9, 10)),
        *lane(SCHEDULER, (Why.GENERATING, 2, 5), (Why.TURN, 5, 10)),
        *lane(ENGINE, (Class.WAIT_OTHER_SIDE, 0, 3), (Class.DECODING, 3, 5), (Class.WAIT_OTHER_SIDE, 5, 9)),
        *lane(ENGINE, (Class.VALIDATING, 9, 10)),
    ]
    account = close(events, SHARED, 10.0)
    assert account.closes
    assert account.devices.keys() == {ENGINE}
    assert seconds(account, ENGINE) == {
        Class.START_UP: 2,
        Class.WAIT_OTHER_SIDE: 1 + 1,
        Class.DECODING: 2,
        Class.TRAINING: 3,
        Class.VALIDATING: 1,
    }


def test_what_no_event_covers_is_not_known_and_taken_by_no_class() -> None:
    account = close(lane(TRAINER, ("update", 1, 4), ("update", 6, 10)), APART, 12.0)
    assert seconds(account, TRAINER) == {Class.START_UP: 1, Class.TRAINING: 7, Class.NOT_KNOWN: 4}
    assert account.closes
    assert account.devices[TRAINER].not_known == 4


@pytest.mark.parametrize("what", ["something new", "update "])
def test_what_has_no_class_is_not_known(what: str) -> None:
    for device in (TRAINER, ENGINE):
        account = close(lane(device, (what, 0, 5)), APART, 5.0)
        assert seconds(account, device) == {Class.NOT_KNOWN: 5}


def test_events_that_overlap_do_not_close() -> None:
    account = close(lane(ENGINE, (Class.DECODING, 0, 6), (Class.PREFILL, 5, 10)), APART, 10.0)
    assert not account.devices[ENGINE].closes
    assert not account.closes


def test_a_device_in_a_lost_ones_place_lives_from_there_on() -> None:
    events = [
        *lane(OTHER, (Class.DECODING, 0, 3), (Class.LOST, 3, 4), (Class.DOWN, 4, 6)),
        Event(RUN, ENDS, 6, 6, text=OTHER),
        Event(RUN, BEGINS, 6, 6, text=f"{ROLLOUT} 2"),
        *lane(f"{ROLLOUT} 2", (Class.START_UP, 6, 7), (Class.DECODING, 7, 9)),
    ]
    account = close(events, APART, 9.0)
    assert account.closes
    assert seconds(account, OTHER) == {Class.DECODING: 3, Class.LOST: 1, Class.DOWN: 2}
    assert seconds(account, f"{ROLLOUT} 2") == {Class.START_UP: 1, Class.DECODING: 2}
    assert sum(account.total.values()) == 9.0


def test_nothing_after_the_end_counts() -> None:
    account = close(lane(ENGINE, (Class.DECODING, 0, 4), (Class.PREFILL, 4, 9), (Class.DECODING, 9, 12)), APART, 6.0)
    assert seconds(account, ENGINE) == {Class.DECODING: 4, Class.PREFILL: 2}
    assert account.closes


def test_every_class_has_a_kind_and_can_be_recorded() -> None:
    assert KINDS.keys() == set(Class)
    recorded = {Class(what) for what in Class} & {*PHASES.values(), *EMPTY_FOR.values()}
    # The others are said by servers and by whoever asks them, in their own name.
    by_name = {
        Class.DECODING,
        Class.PREFILL,
        Class.VALIDATING,
        Class.RE_PREFILL,
        Class.RETRY,
        Class.LOST,
        Class.WAIT_REQUESTS,
        Class.IDLE_PLACES,
        Class.DOWN,
        Class.NOT_KNOWN,
    }
    assert recorded | by_name == set(Class)
    for what in by_name - {Class.NOT_KNOWN}:
        assert seconds(close(lane(ENGINE, (what, 0, 1)), APART, 1.0), ENGINE) == {what: 1}
    for phase, what in PHASES.items():
        assert seconds(close(lane(TRAINER, (phase, 0, 1)), APART, 1.0), TRAINER) == {what: 1}
    for why, what in EMPTY_FOR.items():
        events = [*lane(ENGINE, (EMPTY, 0, 1)), *lane(SCHEDULER, (why, 0, 1))]
        assert seconds(close(events, APART, 1.0), ENGINE) == {what: 1}
    assert set(EMPTY_FOR) == {*Why, Class.START_UP}


LENGTHS = st.lists(st.floats(0.01, 50), min_size=1, max_size=25)


def tiling(name: str, whats: list[str], lengths: list[float], begin: float) -> list[Event]:
    events, now = [], begin
    for number, length in enumerate(lengths):
        events.append(Event(name, whats[number % len(whats)], now, now + length))
        now += length
    return events


@given(LENGTHS, LENGTHS, LENGTHS, st.floats(0, 20), st.booleans(), st.randoms())
def test_the_sums_close_whatever_the_lanes_did(
    trained: list[float],
    scheduled: list[float],
    engines: list[float],
    begin: float,
    shared: bool,
    random: object,
) -> None:
    devices = SHARED if shared else APART
    engine_does = [EMPTY, Class.DECODING, Class.WAIT_WEIGHTS, EMPTY, Class.VALIDATING, Class.WAIT_OTHER_SIDE]
    events = [
        *tiling(TRAINER, list(PHASES), trained, begin),
        *tiling(SCHEDULER, list(Why), scheduled, begin),
        *tiling(ENGINE, engine_does, engines, begin / 2),
        *tiling(f"{LOG_PROBS} 0", [Class.LOG_PROBS, Class.WAIT_REQUESTS], engines, begin),
    ]
    random.shuffle(events)
    until = max(event.end for event in events)
    account = close(events, devices, until)
    for device, found in account.devices.items():
        assert found.life == until
        assert sum(found.seconds.values()) == pytest.approx(until)
        own = [event for event in events if event.lane == device]
        uncovered = until - max(event.end for event in own)
        # An engine that waits for a scheduler of which nothing is known is starting up, not unknown.
        assert found.not_known == pytest.approx(uncovered, abs=1e-6)
    assert account.closes


def test_tokens_close_or_the_account_does_not() -> None:
    books = TokenBooks(sampled=100, restored=10, trained=70, filtered=5, failed=5, cut=10, in_flight=20)
    assert books.not_known == 0
    assert Account(1.0, {}, books).closes
    for wrong in (TokenBooks(sampled=100, trained=99), TokenBooks(sampled=100, trained=101)):
        assert wrong.not_known != 0
        assert not Account(1.0, {}, wrong).closes
    assert not Account(1.0, {}, None).closes, "nobody could say"


def test_summary_has_each_device_and_always_what_is_not_known() -> None:
    summary = close(lane(TRAINER, ("update", 0, 2)), APART, 2.0, TokenBooks(sampled=3, trained=3)).summary()
    assert summary["closes"] is True
    assert summary["seconds"] == {TRAINER: {"accelerators": 2, "life": 2.0, "not_known": 0.0, "training": 2.0}}
    assert summary["accelerator_seconds"] == {"not_known": 0.0, "training": 4.0}
    assert (summary["tokens"]["trained"], summary["tokens"]["not_known"]) == (3, 0)

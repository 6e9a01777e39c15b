# SPDX-License-Identifier: Apache-2.0
"""Every second of a device is in one class, and the sums close, over records that a test writes."""

from __future__ import annotations

import pytest
from accounts import check_seconds
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.prompt_manager import LAST_OF, Why
from recipe.async_engine.record.events import (
    BEGINS,
    EMPTY,
    ENDS,
    LOG_PROBS,
    NOWHERE,
    ROLLOUT,
    RUN,
    SCHEDULER,
    TRAINER,
    Away,
    Class,
    Devices,
    Event,
    TokenBooks,
)
from recipe.report import event_context
from recipe.report.account import KINDS, Account, DeviceAccount, close, meanwhile, pieces
from recipe.report.event_context import PHASES

APART = Devices({TRAINER: 2, ROLLOUT: 1, LOG_PROBS: 1})
SHARED = Devices({TRAINER: 2, ROLLOUT: 1}, shared=True)
LENT = Devices({TRAINER: 1, ROLLOUT: 1}, hybrid=1)
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
        Class.WAIT_BATCH: 1 + 1,
        Class.DECODING: 2,
        Class.TRAINING: 3,
        Class.VALIDATING: 1,
    }


def test_a_lent_accelerator_is_the_trainers_and_its_replicas_in_turn() -> None:
    events = [
        *lane(TRAINER, ("wait", 1, 2), ("switch", 2, 3), ("wait", 3, 5), ("switch", 5, 6), ("update", 6, 9)),
        *lane(TRAINER, ("validate", 9, 10)),
        *lane(SCHEDULER, (Why.GENERATING, 1, 10)),
        *lane(ENGINE, (Class.WAIT_OTHER_SIDE, 0, 3), (Class.DECODING, 3, 5), (Class.WAIT_OTHER_SIDE, 5, 10)),
        *lane(OTHER, (Class.DECODING, 1, 10)),
    ]
    account = close(events, LENT, 10.0)
    assert account.closes
    assert account.devices.keys() == {ENGINE, OTHER}
    assert seconds(account, ENGINE) == {
        Class.START_UP: 1,
        Class.WAIT_BATCH: 1,
        Class.WAIT_SWITCH: 2,
        Class.DECODING: 2,
        Class.TRAINING: 3,
        Class.WAIT_VALIDATION: 1,
    }
    assert seconds(account, OTHER) == {Class.START_UP: 1, Class.DECODING: 9}


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
    events = [
        *lane(ENGINE, (Class.DECODING, 0, 4), (Class.PREFILL, 4, 9), (Class.DECODING, 9, 12)),
        *lane(TRAINER, ("update", 0, 5), ("other", 5, 7), ("save", 8, 9)),
    ]
    account = close(events, APART, 6.0)
    assert seconds(account, ENGINE) == {Class.DECODING: 4, Class.PREFILL: 2}
    assert account.closes
    assert all(0 <= piece.start <= piece.end <= 6.0 for piece in pieces(events, APART, 6.0))


def test_what_begins_with_the_end_is_no_piece() -> None:
    events = lane(TRAINER, ("update", 2, 6), ("sync", 6, 7))
    assert list(pieces(events, APART, 6.0)) == list(pieces(events[:1], APART, 6.0))


def test_a_device_that_had_no_time_closes() -> None:
    assert DeviceAccount(1, 0.0, {}).closes


def test_devices_are_in_the_order_of_trainer_engines_by_their_numbers_and_others() -> None:
    names = ["rollout 10", "log-probs 0", "rollout 9", TRAINER]
    account = close([event for name in names for event in lane(name, ("update", 0, 5))], APART, 5.0)
    assert list(account.devices) == [TRAINER, "rollout 9", "rollout 10", "log-probs 0"]


def test_free_places_are_the_agents_while_no_engine_works_or_while_groups_could_still_begin() -> None:
    events = [
        *lane(TRAINER, ("update", 0, 12)),
        *lane(OTHER, (Class.DECODING, 0, 3), (EMPTY, 3, 6), (Class.DECODING, 6, 9), (EMPTY, 9, 12)),
        *lane(ENGINE, (EMPTY, 0, 12)),
        *lane(SCHEDULER, (Why.GENERATING, 0, 1), (Why.LAST_OF_GATE, 1, 12)),
    ]
    assert seconds(close(events, APART, 12.0), ENGINE) == {
        Class.WAIT_AGENTS: 1 + 3 + 3,
        Class.WAIT_TAIL: 2 + 3,
    }


def scene(what: Class) -> tuple[list[Event], str]:
    """What parts of a run record while a device is in this class for 4 of 10 seconds, and that device."""
    update = lane(TRAINER, ("update", 0, 10))
    if what in BY_PHASE:
        return lane(TRAINER, ("update", 0, 6), (BY_PHASE[what], 6, 10)), TRAINER
    if what in BY_WHY:
        free = [*lane(ENGINE, (Class.DECODING, 0, 6), (EMPTY, 6, 10)), *update]
        return [*free, *lane(SCHEDULER, (Why.GENERATING, 0, 6), (BY_WHY[what], 6, 10))], ENGINE
    scenes: dict[Class, tuple[list[Event], str]] = {
        Class.TRAINING: (lane(TRAINER, ("wait", 0, 6), ("update", 6, 10)), TRAINER),
        Class.WAIT_REWARD: (
            [
                *lane(TRAINER, ("update", 0, 6), ("wait", 6, 10)),
                *lane(SCHEDULER, (Why.REWARD, 6, 10)),
                *lane("agents 0", (f"{Away.REWARD}+{Away.LOG_PROBS}", 6, 10)),
            ],
            TRAINER,
        ),
        Class.WAIT_LOG_PROBS: (
            [
                *lane(ENGINE, (Class.DECODING, 0, 6), (EMPTY, 6, 10)),
                *lane(SCHEDULER, (Why.GENERATING, 0, 6), (Why.REWARD, 6, 10)),
                *lane("agents 0", (NOWHERE, 0, 6), (Away.LOG_PROBS, 6, 10)),
            ],
            ENGINE,
        ),
        Class.WAIT_TAIL: (
            [
                *lane(ENGINE, (Class.DECODING, 0, 6), (EMPTY, 6, 10)),
                *lane(OTHER, (Class.DECODING, 0, 10)),
                *lane(SCHEDULER, (Why.GENERATING, 0, 6), (Why.LAST_OF_GATE, 6, 10)),
            ],
            ENGINE,
        ),
        Class.WAIT_TOOLS: (
            [
                *lane(ENGINE, (Class.DECODING, 0, 6), (EMPTY, 6, 10)),
                *lane(SCHEDULER, (Why.GENERATING, 0, 10)),
                *lane("agents 0", (NOWHERE, 0, 6), (Away.TOOLS, 6, 10)),
            ],
            ENGINE,
        ),
        Class.WAIT_AGENTS: (
            [*lane(ENGINE, (Class.DECODING, 0, 6), (EMPTY, 6, 10)), *lane(SCHEDULER, (Why.GENERATING, 0, 10))],
            ENGINE,
        ),
        Class.IDLE_PLACES: (
            [
                Event(ENGINE, Class.DECODING, 0, 10, 0.6),
                Event(ENGINE, Class.IDLE_PLACES, 0, 10, 0.4),
                *lane(SCHEDULER, (Why.GENERATING, 0, 10)),
            ],
            ENGINE,
        ),
        Class.START_UP: (lane(TRAINER, ("update", 4, 10)), TRAINER),
        Class.NOT_KNOWN: (lane(TRAINER, ("update", 0, 6), ("something new", 6, 10)), TRAINER),
    }
    other = Class.PREFILL if what is Class.DECODING else Class.DECODING
    return scenes.get(what, (lane(ENGINE, (other, 0, 6), (what, 6, 10)), ENGINE))


BY_PHASE = {
    Class.LOG_PROBS: "log_probs",
    Class.WAIT_DRIVER: "train",
    Class.WAIT_CHECKPOINT: "save",
    Class.WAIT_VALIDATION: "validate",
    Class.WAIT_BATCH: "wait",
}
BY_WHY = {
    Class.WAIT_GATE: Why.GATE,
    Class.WAIT_PROMPTS: Why.PROMPTS,
    Class.WAIT_WEIGHTS: Why.DRAIN,
    Class.WAIT_OTHER_SIDE: Why.TURN,
    Class.WAIT_END: Why.END,
}


@pytest.mark.parametrize("what", list(Class))
def test_every_class_has_its_seconds_and_a_kind(what: Class) -> None:
    events, device = scene(what)
    account = close(events, APART, 10.0)
    assert seconds(account, device)[what] == pytest.approx(4.0)
    assert account.closes
    assert what in KINDS
    if what is not Class.NOT_KNOWN:
        check_seconds(account.summary())


@pytest.mark.parametrize("what", [what for what in Class if what is not Class.NOT_KNOWN])
def test_a_class_that_nothing_has_any_more_is_noticed(what: Class) -> None:
    """By what is checked of every run's account."""
    events, _ = scene(what)
    without = [piece for piece in pieces(events, APART, 10.0) if piece.what is not what]
    with pytest.raises(AssertionError, match="not_known"):
        check_seconds(close(events, APART, 10.0, found=without).summary())


@pytest.mark.parametrize("table", ["PHASES", "FREE_FOR", "EMPTY_FOR"])
def test_a_row_that_a_table_lacks_is_not_known(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FREE_FOR alone has an answer for what it lacks: the place is free, whatever for."""
    rows = dict(getattr(event_context, table))
    for name, what in rows.items():
        monkeypatch.setattr(event_context, table, {key: value for key, value in rows.items() if key != name})
        events, device = {
            "PHASES": (lane(TRAINER, (name, 0, 10)), TRAINER),
            "FREE_FOR": ([*lane(ENGINE, (Class.IDLE_PLACES, 0, 10)), *lane(SCHEDULER, (name, 0, 10))], ENGINE),
            "EMPTY_FOR": ([*lane(ENGINE, (EMPTY, 0, 10)), *lane(SCHEDULER, (name, 0, 10))], ENGINE),
        }[table]
        assert seconds(close(events, APART, 10.0), device) == (
            {Class.IDLE_PLACES: 10} if table == "FREE_FOR" else {Class.NOT_KNOWN: 10}
        ), name
        monkeypatch.setattr(event_context, table, rows)
        assert seconds(close(events, APART, 10.0), device) == {what: 10}


def test_what_the_scheduler_says_has_a_meaning_for_an_engine() -> None:
    # For rewards agents have the rest of the answer.
    assert {*event_context.EMPTY_FOR, *event_context.FREE_FOR, Why.REWARD} == {*Why, Class.START_UP}
    assert {*LAST_OF.values(), Why.GENERATING} == set(event_context.FREE_FOR)


def test_while_one_side_waits_it_is_known_what_the_other_did() -> None:
    events = [
        *lane(TRAINER, ("wait", 0, 4), ("update", 4, 7), ("validate", 7, 10)),
        *lane(SCHEDULER, (Why.GENERATING, 0, 3), (Why.GATE, 3, 10)),
        *lane(ENGINE, (Class.DECODING, 0, 3), (EMPTY, 3, 10)),
        *lane(OTHER, (Class.WAIT_WEIGHTS, 0, 2), (Class.DECODING, 2, 3), (EMPTY, 3, 10)),
    ]
    found = meanwhile(pieces(events, APART, 10.0), APART)
    # Two accelerators train; each engine is half of the rollout.
    assert found[Class.WAIT_BATCH] == {
        Class.DECODING: pytest.approx(3 + 1),
        Class.WAIT_WEIGHTS: pytest.approx(2),
        Class.WAIT_GATE: pytest.approx(2),
    }
    assert found[Class.WAIT_GATE] == {
        Class.WAIT_BATCH: pytest.approx(2),
        Class.TRAINING: pytest.approx(6),
        Class.WAIT_VALIDATION: pytest.approx(6),
    }


LENGTHS = st.lists(st.floats(0.01, 50), min_size=1, max_size=25)


def tiling(name: str, whats: list[str], lengths: list[float], begin: float) -> list[Event]:
    events, now = [], begin
    for number, length in enumerate(lengths):
        events.append(Event(name, whats[number % len(whats)], now, now + length))
        now += length
    return events


@given(LENGTHS, LENGTHS, LENGTHS, st.floats(0, 20), st.sampled_from([APART, SHARED, LENT]), st.randoms())
def test_the_sums_close_whatever_the_lanes_did(
    trained: list[float],
    scheduled: list[float],
    engines: list[float],
    begin: float,
    devices: Devices,
    random: object,
) -> None:
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

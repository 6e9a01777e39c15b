# SPDX-License-Identifier: Apache-2.0
"""Silence is counted in time in which something could have been heard; the table of deadlines names real settings."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.config.sections import Timeouts
from recipe.async_engine.core import deadlines
from recipe.async_engine.core.deadlines import MOST_S, Silence


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def too_long_at(silence: Silence, clock: Clock, now: float) -> bool:
    clock.now = now
    return silence.too_long()


def test_silence_past_its_limit_is_noticed_and_a_sign_of_life_begins_it_anew() -> None:
    clock = Clock()
    silence = Silence("a part", 10.0, clock)
    assert not any(too_long_at(silence, clock, float(second)) for second in range(1, 11))
    silence.heard()
    assert not any(too_long_at(silence, clock, float(second)) for second in range(11, 21))
    assert too_long_at(silence, clock, 20.5)


def test_a_sign_of_life_some_time_ago_shortens_silence_and_never_lengthens_it() -> None:
    clock = Clock()
    silence = Silence("a part", 10.0, clock)
    assert not too_long_at(silence, clock, 4.0)
    clock.now = 5.0
    assert not silence.too_long(heard_ago_s=100.0)
    assert silence.seconds == 5.0
    assert not silence.too_long(heard_ago_s=1.5)
    assert silence.seconds == 1.5


def test_listener_that_was_stopped_itself_does_not_hold_that_against_the_other() -> None:
    clock = Clock()
    silence = Silence("a part", 10.0, clock)
    assert not too_long_at(silence, clock, 3600.0)
    assert silence.seconds == MOST_S
    assert not too_long_at(silence, clock, 3605.0)
    assert too_long_at(silence, clock, 3606.0)


@given(gaps=st.lists(st.floats(0.0, 100.0), max_size=50), limit_s=st.floats(0.0, 100.0))
def test_no_more_is_counted_than_passed_and_all_of_it_where_looks_are_frequent(
    gaps: list[float], limit_s: float
) -> None:
    clock = Clock()
    silence = Silence("a part", limit_s, clock)
    for gap in gaps:
        assert too_long_at(silence, clock, clock.now + gap) == (silence.seconds > limit_s)
    assert silence.seconds <= clock.now + 1e-6
    if all(gap <= MOST_S for gap in gaps):
        assert abs(silence.seconds - clock.now) < 1e-6


def test_the_table_names_settings_and_constants_that_there_are() -> None:
    table = "\n".join(line for line in (deadlines.__doc__ or "").splitlines() if line.startswith("| "))
    settings, constants = re.findall(r"``(\w+)``", table), re.findall(r"`([A-Z_]+_S)`", table)
    assert settings and constants
    assert all(hasattr(Timeouts(), name) for name in settings)
    assert all(hasattr(deadlines, name) for name in constants)

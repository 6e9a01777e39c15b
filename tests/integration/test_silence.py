# SPDX-License-Identifier: Apache-2.0
"""Silence is counted in time in which something could have been heard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.actors.watch import MOST_S, Silence


def test_silence_past_its_limit_is_noticed_and_a_sign_of_life_begins_it_anew() -> None:
    silence = Silence(10.0, now=0.0)
    assert not any(silence.look(float(second)) for second in range(1, 11))
    silence.heard()
    assert not any(silence.look(float(second)) for second in range(11, 21))
    assert silence.look(20.5)


def test_listener_that_was_stopped_itself_does_not_hold_that_against_the_other() -> None:
    silence = Silence(10.0, now=0.0)
    assert not silence.look(3600.0)
    assert silence.seconds == MOST_S
    assert not silence.look(3605.0)
    assert silence.look(3606.0)


@given(gaps=st.lists(st.floats(0.0, 100.0), max_size=50), limit_s=st.floats(0.0, 100.0))
def test_no_more_is_counted_than_passed_and_all_of_it_where_looks_are_frequent(
    gaps: list[float], limit_s: float
) -> None:
    silence, now = Silence(limit_s, 0.0), 0.0
    for gap in gaps:
        now += gap
        assert silence.look(now) == (silence.seconds > limit_s)
    assert silence.seconds <= now + 1e-6
    if all(gap <= MOST_S for gap in gaps):
        assert abs(silence.seconds - now) < 1e-6

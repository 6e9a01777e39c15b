# SPDX-License-Identifier: Apache-2.0
"""Slots grow with the time that trajectories are at tools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.prompt_manager import MEMORY, Slots

SECONDS = st.floats(0, 1e6)


def after(slots: Slots, trajectories: int, at_engines_s: float, at_tools_s: float) -> int:
    for _ in range(trajectories):
        slots.ended(at_engines_s, at_tools_s)
    return slots.count


@given(st.integers(1, 100), st.integers(0, 300), st.lists(st.tuples(SECONDS, SECONDS), max_size=50))
def test_there_are_always_as_many_as_the_engines_take_and_never_more_than_may_be(
    least: int, more: int, ended: list[tuple[float, float]]
) -> None:
    slots = Slots(least, least + more)
    assert slots.count == least
    for at_engines_s, at_tools_s in ended:
        assert least <= slots.ended(at_engines_s, at_tools_s) == slots.count <= least + more


@given(st.integers(1, 100), st.lists(SECONDS, max_size=50))
def test_without_tools_there_is_no_other_number(least: int, ended: list[float]) -> None:
    slots = Slots(least, 10 * least)
    assert all(slots.ended(at_engines_s, 0.0) == least for at_engines_s in ended)


@pytest.mark.parametrize(("at_tools_s", "count"), [(1.0, 15), (2.0, 20), (5.0, 35), (30.0, 40)])
def test_engines_have_their_number_beside_those_at_tools(at_tools_s: float, count: int) -> None:
    """Of 15 that wait for an answer for 2 seconds and are at tools for one, 10 are at engines."""
    assert after(Slots(10, 40), 1, 2.0, at_tools_s) == count


def test_what_ended_longer_ago_counts_for_less() -> None:
    slots = Slots(10, 40)
    assert after(slots, 100, 1.0, 2.0) == 30
    assert 15 < after(slots, 10 * MEMORY, 1.0, 0.0) < 25
    assert after(slots, 100 * MEMORY, 1.0, 0.0) == 10

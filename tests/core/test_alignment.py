# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a trajectory ended up in its response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.versions import Part, place

PROMPT = [1, 2]


def test_parts_of_an_interrupted_answer_follow_each_other() -> None:
    parts = [Part(0, PROMPT, [5, 6]), Part(1, [*PROMPT, 5, 6], [7])]
    assert place(parts, PROMPT, [5, 6, 7], [1, 1, 1]) == [(0, 2), (2, 1)]


def test_tool_tokens_between_two_turns_are_context() -> None:
    parts = [Part(0, PROMPT, [5]), Part(0, [*PROMPT, 5, 90, 91], [6, 7])]
    assert place(parts, PROMPT, [5, 90, 91, 6, 7], [1, 0, 0, 1, 1]) == [(0, 1), (3, 2)]


def test_response_that_was_cut_uses_parts_of_parts() -> None:
    parts = [Part(0, PROMPT, [5, 6, 7]), Part(0, [*PROMPT, 5, 6, 7], [8])]
    assert place(parts, PROMPT, [5, 6], [1, 1]) == [(0, 2), (2, 0)]


def test_rewritten_answers_are_not_placed() -> None:
    part = Part(0, PROMPT, [5, 6])
    assert place([part], PROMPT, [5, 9], [1, 1]) is None
    assert place([part], [1, 3], [5, 6], [1, 1]) is None
    assert place([part], PROMPT, [5, 6, 7], [1, 1, 1]) is None
    assert place([Part(0, PROMPT, [5])], PROMPT, [5, 90, 91, 8], [1, 0, 0, 1]) is None
    assert place([Part(0, [1], [5, 6])], PROMPT, [5, 6], [1, 1]) is None


def test_parts_of_other_outputs_are_left_out() -> None:
    """The agent loop asked in another context, or of another prompt."""
    own, others = Part(0, PROMPT, [5, 6]), [Part(1, [*PROMPT, 9], [6]), Part(1, [1], [5, 6]), Part(1, [3, 4, 8], [6])]
    for other in others:
        assert place([other, own], PROMPT, [5, 6], [1, 1]) == [(2, 0), (0, 2)]
        assert place([other], PROMPT, [5, 6], [1, 1]) is None
    assert place(others[:1], PROMPT, [5], [0]) == [(1, 0)], "its context ends where the response does"


def test_a_part_may_begin_in_the_prompt() -> None:
    """Another output trains its beginning."""
    part = Part(0, PROMPT, [5, 6, 7])
    assert place([part], [*PROMPT, 5], [6, 7, 8], [1, 1, 0]) == [(0, 2)]
    assert place([part], [*PROMPT, 5], [6], [1]) == [(0, 1)]
    assert place([part], [*PROMPT, 9], [6, 7], [1, 1]) is None
    assert place([part], [*PROMPT, 5, 6, 7, 8], [9], [0]) == [(1, 0)]


def test_mask_of_another_length_than_the_response_is_refused() -> None:
    with pytest.raises(ValueError, match="the mask has 1 tokens, the response 2"):
        place([], PROMPT, [5, 6], [0])


@given(
    turns=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=3)),
        min_size=1,
        max_size=5,
    ),
    cut=st.integers(0, 30),
)
def test_every_sampled_token_is_placed_once(turns: list[tuple[list[int], list[int]]], cut: int) -> None:
    """Whatever the turns and wherever the response ends."""
    parts, response, mask = [], [], []
    for tokens, tool in turns:
        parts.append(Part(0, [*PROMPT, *response], tokens))
        response += [*tokens, *tool]
        mask += [1] * len(tokens) + [0] * len(tool)
    response, mask = response[: max(1, cut)], mask[: max(1, cut)]
    places = place(parts, PROMPT, response, mask)
    assert places is not None
    covered = [position for first, count in places for position in range(first, first + count)]
    assert sorted(covered) == [position for position, sampled in enumerate(mask) if sampled]
    for part, (first, count) in zip(parts, places, strict=True):
        assert list(part.tokens[:count]) == response[first : first + count]

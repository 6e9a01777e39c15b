# SPDX-License-Identifier: Apache-2.0
"""An answer that an agent sends back is found again, however its client library has changed its form."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.agents.history import History, images, to_render
from recipe.agents.history import digests as digests_of_rendered

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
ANSWER = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "2"}


def digests(tools: list[Any], messages: list[Any]) -> list[bytes]:
    return digests_of_rendered(tools, [to_render(message) for message in messages])


@pytest.fixture
def history() -> History:
    known = History()
    known.remember(digests(TOOLS, ASKED), ANSWER, 0)
    return known


@pytest.mark.parametrize(
    "sent",
    [
        ANSWER,
        {**ANSWER, "content": ""},
        {**ANSWER, "content": [], "refusal": None, "annotations": [], "reasoning_content": "hm"},
        {**ANSWER, "tool_calls": [{**CALL, "id": "other"}]},
        {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"b":1,"a":1}'}}]},
    ],
)
def test_an_answer_in_another_form_is_the_same_answer(history: History, sent: dict[str, Any]) -> None:
    assert history.match(digests(TOOLS, [*ASKED, sent, RESULT])) == (0, 3)


@pytest.mark.parametrize(
    "sent",
    [
        {**ANSWER, "content": "I add."},
        {**ANSWER, "tool_calls": []},
        {**ANSWER, "tool_calls": [CALL, CALL]},
        {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]},
        {**ANSWER, "role": "user"},
    ],
)
def test_another_answer_is_another_one(history: History, sent: dict[str, Any]) -> None:
    assert history.match(digests(TOOLS, [*ASKED, sent, RESULT])) is None


def test_other_tools_or_another_request_are_not_matched(history: History) -> None:
    assert history.match(digests([], [*ASKED, ANSWER, RESULT])) is None
    assert history.match(digests(TOOLS, [ASKED[1], ANSWER, RESULT])) is None


def test_the_longest_beginning_counts(history: History) -> None:
    said = {"role": "assistant", "content": " 2\n"}
    history.remember(digests(TOOLS, [*ASKED, ANSWER, RESULT]), said, 1)
    again = [*ASKED, ANSWER, RESULT, {**said, "content": "2"}, {"role": "user", "content": "Sure?"}]
    assert history.match(digests(TOOLS, again)) == (1, 5)
    assert history.match(digests(TOOLS, [*ASKED, ANSWER, {**RESULT, "content": "3"}, *again[4:]])) == (0, 3)


def test_a_request_whose_answer_is_known_is_not_a_continuation_of_it(history: History) -> None:
    assert history.match(digests(TOOLS, ASKED)) is None
    assert history.match(digests(TOOLS, [*ASKED, ANSWER])) is None


def test_templates_get_text_mappings_and_images() -> None:
    assert to_render(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ) == {
        "role": "system",
        "content": "ab",
    }
    assert to_render(ANSWER)["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 1}
    shown = to_render({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]})
    assert images([shown]) == ["data:,x"]

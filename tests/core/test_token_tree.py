# SPDX-License-Identifier: Apache-2.0
"""Whatever an agent makes of its history: each sampled token is trained exactly once, and nothing else is."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.agents.tree import TokenTree, common

PROMPT, RESPONSE = 8, 24
# Few different tokens, so that histories agree by chance too.
TOKENS = st.integers(0, 2)
WAYS = ("append", "cut", "summarise", "reorder", "retokenise", "branch", "retry", "stop word")


def retokenised(tokens: list[int], chance: random.Random) -> list[int]:
    """The same text with other tokens: a pair becomes a token of its own, or one token two."""
    made: list[int] = []
    for token in tokens:
        if made and made[-1] < 3 and token < 3 and chance.random() < 0.2:
            made[-1] = 3 + 3 * made[-1] + token
        elif token >= 3 and chance.random() < 0.5:
            made += divmod(token - 3, 3)
        else:
            made.append(token)
    return made


def next_prompt(tree: TokenTree, way: str, context: list[int], chance: random.Random) -> list[int]:
    """What an agent sends after what it has been answered."""
    if not tree.exchanges:
        return context
    exchange = tree.exchanges[-1] if way != "branch" else chance.choice(tree.exchanges)
    told = list(exchange.tokens)
    if way == "cut":
        begin, end = sorted((chance.randrange(len(told) + 1), chance.randrange(len(told) + 1)))
        del told[begin:end]
    elif way == "summarise":
        told[: chance.randrange(len(told) + 1)] = context[:1]
    elif way == "reorder":
        middle = chance.randrange(len(told) + 1)
        told = told[middle:] + told[:middle]
    elif way == "retokenise":
        told = retokenised(told, chance)
    elif way == "retry":
        return list(exchange.prompt)
    elif way == "stop word":
        told = told[: len(exchange.prompt) + chance.randrange(len(exchange.sampled) + 1)]
    return [*told, *context]


@pytest.mark.parametrize(
    "examples", [500, pytest.param(int(os.environ.get("TREE_EXAMPLES", "10000")), marks=pytest.mark.slow)]
)
def test_each_sampled_token_is_trained_exactly_once_after_the_tokens_that_it_was_sampled_after(examples: int) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(WAYS),
                st.lists(TOKENS, min_size=1, max_size=4),
                st.lists(st.lists(TOKENS, min_size=1, max_size=5), min_size=1, max_size=3),
            ),
            max_size=10,
        ),
        st.integers(0, 2**32),
    )
    def check(requests: list[tuple[str, list[int], list[list[int]]]], seed: int) -> None:
        chance, tree = random.Random(seed), TokenTree(PROMPT, RESPONSE)
        number = 0.0
        for way, context, answers in requests:
            prompt = next_prompt(tree, way, context, chance)
            # Several answers to one request: `n`, two requests at once, or a retry after a timeout.
            room = tree.room(prompt) if prompt else 0
            for answer in answers if room > 0 else ():
                sampled = answer[:room]
                # The log-prob tells which sampled token it is.
                tree.add(prompt, sampled, [number + place for place in range(1, len(sampled) + 1)])
                number += len(sampled)
        segments = tree.segments()
        trained: Counter[float] = Counter()
        for segment in segments:
            assert len(segment.response) == len(segment.mask) == len(segment.log_probs) <= RESPONSE
            assert 1 <= len(segment.prompt) <= PROMPT
            assert any(segment.mask)
            sequence = segment.prompt + segment.response
            for place, (mask, identity) in enumerate(zip(segment.mask, segment.log_probs, strict=True)):
                assert mask in (0, 1) and (mask == 1) == (identity != 0.0)
                if not mask:
                    continue
                trained[identity] += 1
                exchange = next(each for each in tree.exchanges if identity in each.log_probs)
                end = len(exchange.prompt) + exchange.log_probs.index(identity) + 1
                assert tuple(sequence[: len(segment.prompt) + place + 1]) == exchange.tokens[:end]
        assert trained == Counter(each for exchange in tree.exchanges for each in exchange.log_probs)
        seen["branches"] += len(segments) > 1
        seen["continued"] += any(segment.turns > 1 for segment in segments)
        seen["left over"] += len(segments) > len(
            [each for each in tree.exchanges if each.number not in {of.parent for of in tree.exchanges}]
        )

    check()
    # Otherwise it would have tried little.
    assert min(seen["branches"], seen["continued"], seen["left over"]) > examples / 50, seen


def test_a_conversation_that_only_grows_is_one_segment() -> None:
    tree = TokenTree(PROMPT, RESPONSE)
    tree.add([1, 2], [3, 4], [-0.1, -0.2])
    tree.add([1, 2, 3, 4, 9, 9], [5], [-0.3])
    (segment,) = tree.segments()
    assert (segment.prompt, segment.response) == ([1, 2], [3, 4, 9, 9, 5])
    assert (segment.mask, segment.log_probs) == ([1, 1, 0, 0, 1], [-0.1, -0.2, 0.0, 0.0, -0.3])
    assert (segment.last, segment.turns) == (1, 2)


def test_a_rewritten_history_is_context_and_what_was_sampled_is_trained_where_it_was() -> None:
    tree = TokenTree(PROMPT, RESPONSE)
    tree.add([1, 2], [3, 4], [-0.1, -0.2])
    tree.add([1, 7, 3, 4, 9], [5], [-0.3])
    first, second = tree.segments()
    assert (first.prompt, first.response, first.mask) == ([1, 2], [3, 4], [1, 1])
    assert (second.prompt, second.response, second.mask) == ([1, 7, 3, 4, 9], [5], [1])


def test_two_branches_train_what_they_share_once() -> None:
    tree = TokenTree(PROMPT, RESPONSE)
    tree.add([1], [2, 3], [-0.1, -0.2])
    tree.add([1, 2, 3, 8], [4], [-0.3])
    tree.add([1, 2, 3, 9], [5], [-0.4])
    first, second = tree.segments()
    assert (first.response, first.mask) == ([2, 3, 8, 4], [1, 1, 0, 1])
    assert (second.prompt, second.response, second.mask) == ([1, 2, 3, 9], [5], [1])


def test_equal_answers_to_one_prompt_are_two_samples() -> None:
    tree = TokenTree(PROMPT, RESPONSE)
    tree.add([1], [2], [-0.1])
    tree.add([1], [2], [-0.2])
    tree.add([1, 2, 8], [4], [-0.3])
    tree.add([1, 2, 9], [5], [-0.4])
    first, second = tree.segments()
    assert sorted([first.log_probs[0], second.log_probs[0]]) == [-0.2, -0.1]
    assert [segment.mask for segment in (first, second)] == [[1, 0, 1], [1, 0, 1]]


def test_other_images_in_place_of_the_same_tokens_begin_anew() -> None:
    tree = TokenTree(PROMPT, RESPONSE)
    tree.add([1, 0, 0], [2], [-0.1], ["a red one"])
    assert tree.add([1, 0, 0, 2, 8], [3], [-0.2], ["a blue one"]).parent is None
    assert tree.add([1, 0, 0, 2, 8], [3], [-0.2], ["a red one", "another"]).parent == 0


def test_a_prompt_that_is_too_long_has_no_room() -> None:
    tree = TokenTree(PROMPT, RESPONSE)
    assert tree.room([1]) == RESPONSE
    assert tree.room([1] * (PROMPT + RESPONSE)) == 0
    tree.add([1], [2] * 4, [-0.1] * 4)
    # The first prompt is short, and what follows counts as response.
    assert tree.room([1, *[2] * 4, 9]) == RESPONSE - 5


def test_an_empty_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="0 answer tokens"):
        TokenTree(PROMPT, RESPONSE).add([1], [], [])


@given(st.lists(TOKENS), st.lists(TOKENS))
def test_the_common_prefix_is_as_long_as_possible(one: list[int], other: list[int]) -> None:
    length = common(tuple(one), tuple(other))
    assert one[:length] == other[:length]
    assert one[: length + 1] != other[: length + 1] or length == min(len(one), len(other))

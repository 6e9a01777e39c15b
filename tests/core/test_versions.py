# SPDX-License-Identifier: Apache-2.0
"""Per-token policy versions: run-length coding, ages, alignment with what an agent loop returns."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from counted_steps import steps_of
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.errors import VersionRecordError
from recipe.async_engine.core.versions import (
    NOT_SAMPLED,
    Alignment,
    RequestVersions,
    align,
    align_in,
    context_of,
    joined,
    last_runs,
    run_lengths,
)


def labels_of(found: Alignment) -> list[int]:
    """One version per token."""
    return [version for version, count in found.runs for _ in range(count)]


VERSIONS = st.lists(st.integers(NOT_SAMPLED, 4), max_size=30)


@given(VERSIONS)
def test_run_length_coding_agrees_with_plain_lists(versions: list[int]) -> None:
    runs = run_lengths(versions)
    assert labels_of(Alignment(runs, exact=True)) == versions
    assert all(one != next_one for (one, _), (next_one, _) in pairwise(runs))
    sampled = [version for version in versions if version != NOT_SAMPLED]
    if sampled:
        found = Alignment(runs, exact=True)
        assert (found.oldest, found.newest) == (min(sampled), max(sampled))


@given(VERSIONS, VERSIONS, st.integers(-1, 40))
def test_runs_are_joined_and_cut_as_the_lists_that_they_stand_for(one: list[int], other: list[int], count: int) -> None:
    assert joined(run_lengths(one), run_lengths(other)) == run_lengths(one + other)
    assert last_runs(run_lengths(one), count) == run_lengths(one[max(0, len(one) - max(0, count)) :])


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=12), st.data())
def test_requests_have_the_versions_that_sampled_between_the_swaps(
    rounds: list[list[int]], data: st.DataObject
) -> None:
    """Two requests, one of which comes later; between swaps each samples some tokens."""
    versions, truth = RequestVersions(), {"early": [], "late": []}
    begins = data.draw(st.integers(0, len(rounds)))
    versions.submit("early", 0)
    for version, sampled in enumerate(rounds):
        if version == begins:
            versions.submit("late", version)
        for name, count in zip(truth, sampled, strict=True):
            if name == "early" or version >= begins:
                truth[name] += [version] * count
        for name, labels in truth.items():
            known = data.draw(st.integers(0, len(labels)))
            if labels:
                assert versions.runs(name, known) == run_lengths(labels[:known])
        # A request that has no token yet may be unknown to the engine.
        versions.swap({name: len(labels) for name, labels in truth.items() if labels}, version + 1)
    for name, labels in truth.items():
        if labels:
            assert versions.runs(name, len(labels)) == run_lengths(labels)
        assert versions.swapped_under(name) == (len(rounds) > (0 if name == "early" else begins))
        versions.forget(name)
        assert versions.runs(name, 1) is None and not versions.swapped_under(name)


def test_tokens_of_a_version_that_was_never_told_have_no_label() -> None:
    versions = RequestVersions()
    versions.submit("one", None)
    assert versions.runs("one", 0) == [] and versions.runs("one", 2) is None
    versions.swap({"one": 2}, 5)
    assert versions.runs("one", 3) is None
    versions.submit("two", None)
    versions.swap({}, 6)
    assert versions.runs("two", 3) == [(6, 3)]


def test_response_that_is_all_of_the_pieces_has_their_versions() -> None:
    found = align([(1, [10, 11]), (2, [12])], [10, 11, 12], [1, 1, 1])
    assert (labels_of(found), found.exact) == ([1, 1, 2], True)


def test_tool_tokens_between_turns_are_marked_as_unsampled() -> None:
    found = align([(1, [10, 11]), (2, [12, 13])], [10, 11, 99, 99, 12, 13], [1, 1, 0, 0, 1, 1])
    assert (labels_of(found), found.exact) == ([1, 1, NOT_SAMPLED, NOT_SAMPLED, 2, 2], True)


def test_cut_response_has_the_versions_of_what_is_left() -> None:
    found = align([(1, [10, 11]), (2, [12, 13])], [10, 11, 12], [1, 1, 1])
    assert (labels_of(found), found.exact) == ([1, 1, 2], True)


def test_discarded_turn_is_left_out() -> None:
    found = align([(1, [10, 11]), (2, [20, 21]), (3, [30])], [10, 11, 30], [1, 1, 1])
    assert (labels_of(found), found.exact) == ([1, 1, 3], True)


def test_turns_cut_at_their_ends_are_aligned() -> None:
    found = align([(1, [10, 11, 2]), (2, [12, 13, 2])], [10, 11, 99, 12, 13], [1, 1, 0, 1, 1])
    assert (labels_of(found), found.exact) == ([1, 1, NOT_SAMPLED, 2, 2], True)


def test_token_that_two_readings_give_different_versions_gets_the_older_one() -> None:
    # [7, 8, 5] is a piece of version 1 or of version 2, after a piece of version 0 that was cut.
    found = align([(0, [1, 2]), (1, [7, 8]), (2, [7, 8]), (3, [5])], [1, 7, 8, 5], [1, 1, 1, 1])
    assert (labels_of(found), found.exact) == ([0, 1, 1, 3], False)


def test_two_readings_with_the_same_versions_are_exact() -> None:
    found = align([(0, [1, 2]), (1, [7, 8]), (1, [7, 8]), (3, [5])], [1, 7, 8, 5], [1, 1, 1, 1])
    assert (labels_of(found), found.exact) == ([0, 1, 1, 3], True)


def test_rewritten_response_gets_the_oldest_version_and_is_inexact() -> None:
    found = align([(4, [10, 11]), (3, [12])], [10, 77, 12], [1, 1, 0])
    assert (labels_of(found), found.exact) == ([3, 3, NOT_SAMPLED], False)


def test_one_token_repeated_is_aligned_in_bounded_work() -> None:
    pieces = [(version, [5] * 200) for version in range(100)]
    found = align(pieces, [6, *[5] * 5000], [1] * 5001)
    assert not found.exact
    assert found.runs == [(0, 5001)]


def test_an_alignment_takes_at_most_32_comparisons_for_each_token() -> None:
    pieces = [(version, [5] * 3) for version in range(36)]
    # 42 tokens take 4800 comparisons, 32 for each of the 150 recorded and sampled ones; 43 take more.
    assert labels_of(align(pieces, [5] * 42, [1] * 42)) == [token // 3 for token in range(42)]
    assert align(pieces, [5] * 43, [1] * 43).runs == [(0, 43)]


def test_version_under_which_nothing_was_sampled_does_not_count() -> None:
    assert align([(0, []), (2, [10]), (3, [11])], [11, 10], [1, 1]) == Alignment([(2, 2)], exact=False)
    with pytest.raises(VersionRecordError, match="1 tokens are marked as sampled"):
        align([(0, [])], [1], [1])


def test_response_without_sampled_tokens_needs_no_record() -> None:
    found = align([], [1, 2], [0, 0])
    assert (labels_of(found), found.exact) == ([NOT_SAMPLED] * 2, True)
    assert align([(1, [5])], [], []).runs == []


def test_unrecorded_generation_and_unequal_lengths_are_refused() -> None:
    with pytest.raises(VersionRecordError, match="1 tokens are marked as sampled"):
        align([], [1], [1])
    with pytest.raises(VersionRecordError, match="mask has 2"):
        align([(0, [1])], [1], [1, 1])
    with pytest.raises(VersionRecordError, match="a negative version"):
        align([(NOT_SAMPLED, [1])], [1], [1])


def test_coincidence_at_a_cut_is_not_taken_for_exact() -> None:
    # The cut token 2 of the first turn is also the first token of the next: it may be of version 1 or 2.
    found = align([(1, [10, 2]), (2, [2, 30]), (3, [40])], [10, 2, 40], [1, 1, 1])
    assert (labels_of(found), found.exact) == ([1, 1, 3], False)


def readings(pieces: list[tuple[int, list[int]]], sampled: list[int]) -> list[list[int]]:
    """The versions of the sampled tokens by every reading, one after the other."""
    if not pieces:
        return [] if sampled else [[]]
    (version, tokens), rest = pieces[0], pieces[1:]
    found = []
    for used in range(len(tokens) + 1):
        if tokens[:used] == sampled[:used]:
            found += [[version] * used + others for others in readings(rest, sampled[used:])]
    return found


PIECES = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=4)), max_size=5)


@given(PIECES, st.lists(st.integers(0, 4), min_size=5, max_size=5), st.lists(st.integers(0, 1), max_size=3))
def test_labels_are_the_oldest_of_all_readings_and_exact_if_there_is_one(
    pieces: list[tuple[int, list[int]]], used: list[int], rewritten: list[int]
) -> None:
    sampled = [token for (_, tokens), count in zip(pieces, used, strict=False) for token in tokens[:count]]
    sampled += rewritten if pieces else []
    found = align(pieces, sampled, [1] * len(sampled))
    every = readings(pieces, sampled)
    if every:
        assert labels_of(found) == [min(versions) for versions in zip(*every, strict=True)]
        assert found.exact == all(len(set(versions)) == 1 for versions in zip(*every, strict=True))
    else:
        oldest = min(version for version, _ in pieces)
        assert (labels_of(found), found.exact) == ([oldest] * len(sampled), False)


def test_exact_labels_are_true_and_no_label_is_newer_than_the_truth() -> None:
    """Random loops that discard and cut turns, over vocabularies so small that wrong readings are frequent."""
    rng = random.Random(0)
    exact = inexact = 0
    for _ in range(4000):
        vocabulary = rng.choice((2, 3, 50))
        version, pieces, kept, truth, mask = rng.randint(0, 2), [], [], [], []
        for _ in range(rng.randint(1, 5)):
            tokens = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 6))]
            pieces.append((version, tokens))
            if pieces[1:] and rng.random() < 0.2:
                tokens = []
            elif rng.random() < 0.3:
                tokens = tokens[: rng.randint(1, len(tokens))]
            kept += [*tokens, 1000]
            truth += [version] * len(tokens) + [NOT_SAMPLED]
            mask += [1] * len(tokens) + [0]
            version = max(0, version + rng.randint(-1, 2))
        found = align(pieces, kept, mask)
        labels = labels_of(found)
        assert [label == NOT_SAMPLED for label in labels] == [not sampled for sampled in mask]
        assert all(label <= true for label, true in zip(labels, truth, strict=True))
        if found.exact:
            exact += 1
            assert labels == truth
        inexact += not found.exact
    assert exact > 500
    assert inexact > 200


def test_complete_answer_costs_as_many_steps_as_it_has_runs() -> None:
    def cost(tokens: int) -> int:
        pieces = [(version, list(range(tokens))) for version in range(4)]
        response = [token for _, piece in pieces for token in [*piece, 0, 0]]
        mask = ([1] * tokens + [0, 0]) * 4
        found = align(pieces, response, mask)
        assert found.runs == [run for version in range(4) for run in ((version, tokens), (NOT_SAMPLED, 2))]
        return steps_of(lambda: align(pieces, response, mask))

    assert cost(8192) == cost(8)


@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    prompt_end=st.integers(-20, 20),
    context=st.integers(0, 20),
    data=st.data(),
)
def test_an_output_that_trains_only_the_end_of_an_answer_has_that_ends_versions(
    prompt: list[int], lengths: list[int], prompt_end: int, context: int, data: st.DataObject
) -> None:
    """The answer's beginning is in the output's prompt, or in its response as context, or both."""
    answer = data.draw(st.lists(st.integers(0, 2**20), min_size=sum(lengths), max_size=sum(lengths), unique=True))
    pieces, contexts, place = [], [], 0
    for version, length in enumerate(lengths):
        contexts.append(context_of([*prompt, *answer[:place]]))
        pieces.append((version, answer[place : place + length]))
        place += length
    versions = [version for version, tokens in pieces for _ in tokens]
    first = max(1, min(len(prompt) + prompt_end, len(prompt) + len(answer) - 1))
    begin = max(first, min(len(prompt) + context, len(prompt) + len(answer) - 1))
    sequence = [*prompt, *answer]
    mask = [place >= max(begin, len(prompt)) for place in range(first, len(sequence))]
    found = align_in(pieces, contexts, sequence[:first], sequence[first:], mask)
    assert found.exact
    labels = [NOT_SAMPLED] * len(prompt) + versions
    assert labels_of(found) == [
        label if trained else NOT_SAMPLED for label, trained in zip(labels[first:], mask, strict=True)
    ]

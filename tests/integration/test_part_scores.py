# SPDX-License-Identifier: Apache-2.0
"""Answers of log-prob servers that no batch can take: the trainer computes these, and no trajectory fails."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from recipe.async_engine.core.versions import Part
from recipe.async_engine.log_prob_servers.client import PartScorer, score
from recipe.async_engine.log_prob_servers.service import Answer, Unscored

GOOD = np.full((2, 3), -0.5, np.float32)


def spoilt(value: float) -> np.ndarray:
    scores = GOOD.copy()
    scores[1, 2] = value
    return scores


class Client:
    """In place of the servers: each request is answered with the next scores."""

    def __init__(self, *scores: np.ndarray) -> None:
        self.scores = list(scores)

    async def score(self, sequence: object, tokens: int, version: int, start: int) -> Answer:
        return Answer(self.scores.pop(0), version, late=False, queued_s=0.0)


@pytest.mark.parametrize(
    "scores", [spoilt(np.nan), spoilt(-np.inf), GOOD[:, :2], np.concatenate([GOOD, GOOD], axis=1), GOOD[:1]], ids=str
)
async def test_answer_with_numbers_that_are_none_or_not_one_for_each_token_counts_as_none(scores: np.ndarray) -> None:
    with pytest.raises(Unscored, match="scores of version 7 "):
        await score(Client(scores), Part(7, [1, 2], [3, 4, 5]), 0)
    scorer = PartScorer(Client(GOOD, scores), 0)
    scorer.add(7, [1, 2], [3, 4, 5])
    scorer.add(8, [1, 2, 3, 4, 5], [6, 7, 8])
    assert await scorer.collect([1, 2], [3, 4, 5, 6, 7, 8], [1] * 6) is None


async def test_answer_with_a_number_for_each_token_is_taken() -> None:
    scorer = PartScorer(Client(GOOD), 0)
    scorer.add(7, [1, 2], [3, 4, 5])
    scored = await asyncio.wait_for(scorer.collect([1, 2], [3, 4, 5], [1] * 3), 10)
    assert scored is not None and scored.log_probs.tolist() == [-0.5] * 3


async def test_each_output_of_a_list_gets_the_scores_of_its_own_parts_whatever_became_of_the_others() -> None:
    scorer = PartScorer(Client(GOOD, GOOD - 1, spoilt(np.nan)), 0)
    scorer.add(7, [1, 2], [3, 4, 5])
    scorer.add(8, [9], [3, 4, 5])
    scorer.add(8, [1, 2, 6], [3, 4, 5])
    first, second = await scorer.collect([1, 2], [3, 4, 5], [1] * 3), await scorer.collect([9], [3, 4, 5], [1] * 3)
    assert first is not None and (first.log_probs.tolist(), first.versions.tolist()) == ([-0.5] * 3, [7] * 3)
    assert second is not None and (second.log_probs.tolist(), second.versions.tolist()) == ([-1.5] * 3, [8] * 3)
    assert await scorer.collect([1, 2, 6], [3, 4, 5], [1] * 3) is None


async def test_an_output_that_has_an_answers_beginning_in_its_prompt_gets_the_scores_of_its_end() -> None:
    scorer = PartScorer(Client(np.array([[-1, -2, -3], [1, 2, 3]], np.float32)), 0)
    scorer.add(7, [1, 2], [3, 4, 5])
    scored = await scorer.collect([1, 2, 3], [4, 5, 6], [1, 1, 0])
    assert scored is not None and scored.log_probs.tolist() == [-2.0, -3.0, 0.0]

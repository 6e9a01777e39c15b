# SPDX-License-Identifier: Apache-2.0
"""Tokens close where scheduler, workers and engines agree, and do not where one of them is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipe.async_engine.record.events import GROUPS, Event
from recipe.async_engine.record.rollout_books import RolloutBooks
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.group_run import TrajectoryScored
from recipe.async_engine.rollout.kept_answers import TokenAccount

SCORED = TrajectoryScored(1.0, 0, 0, True, 0, 0, 6, sampled_tokens=6, received_tokens=7)
"""An answer of 6 tokens, after one that its agent loop left out."""
BEFORE = {"sampled": 65, "answered": 50, "under_way": 11}
AFTER = {"sampled": 70, "answered": 52, "under_way": 0}
WORKERS = TokenAccount(received=51, dropped=8, unfinished=8)


def counted() -> RolloutBooks:
    """Five answers: two are trained, one each is filtered, of a failed group and of one that lives."""
    timeline = Timeline(lambda: 0.0)
    for _ in range(5):
        timeline.rollout.arrived(SCORED, is_wanted=True)
    for what in ("trained", "trained", "filtered", "failed"):
        timeline.tell(Event(GROUPS, what, 0.0, 0.0, tokens=SCORED.sampled_tokens))
    return timeline.rollout


def test_every_token_that_an_engine_sampled_is_in_one_class() -> None:
    books = counted().close(6, vars(WORKERS), BEFORE, AFTER)
    assert (books.sampled, books.trained, books.filtered, books.failed) == (70, 12, 6, 6)
    # Left out, thrown away at the engine, answered to nobody, and of attempts that failed.
    assert books.cut == 5 + 4 + 1 + 8
    # Complete ones, requests that were ended with the run, and trajectories that were.
    assert books.in_flight == 6 + 14 + 8
    assert books.not_known == 0


@pytest.mark.parametrize("change", [{"received": 52}, {"dropped": 9}, {"unfinished": 7}, {"received": 49}])
def test_books_that_workers_do_not_agree_with_do_not_close(change: dict[str, int]) -> None:
    assert counted().close(6, vars(WORKERS) | change, BEFORE, AFTER).not_known != 0


@pytest.mark.parametrize("name", ["received", "trained", "filtered", "failed", "cut"])
def test_a_class_that_is_not_counted_is_missed(name: str) -> None:
    tokens = counted()
    tokens.tokens[name] -= 1
    books = tokens.close(6, vars(WORKERS), BEFORE, AFTER)
    # What workers received is theirs to say: the scheduler's own count of it stands in where one has died.
    assert (books.not_known != 0) == (name != "received")
    assert tokens.close(6, None, None, None).not_known != 0


def test_where_an_engine_or_a_worker_died_the_others_counts_stand_for_its() -> None:
    tokens = counted()
    of_workers = tokens.close(6, vars(WORKERS), None, None)
    assert (of_workers.sampled, of_workers.cut, of_workers.not_known) == (51, 5 + 8, 0)
    alone = tokens.close(6, None, None, None)
    assert (alone.sampled, alone.not_known) == (35, 0)


def test_restored_tokens_are_trained_and_were_not_sampled() -> None:
    tokens = RolloutBooks(lambda: 0.0, 1)
    tokens.arrived(replace(SCORED, restored_tokens=4, received_tokens=2), is_wanted=True)
    tokens.tokens["trained"] += 6
    books = tokens.close(0, {"received": 2}, {}, {"sampled": 2, "answered": 2})
    assert (books.sampled, books.restored, books.trained, books.not_known) == (2, 4, 6, 0)


def test_answer_of_a_group_that_ended_is_cut() -> None:
    tokens = RolloutBooks(lambda: 0.0, 1)
    tokens.arrived(SCORED, is_wanted=False)
    assert tokens.close(0, {"received": 7}, {}, {"sampled": 7, "answered": 7}).cut == 7

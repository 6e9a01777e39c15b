# SPDX-License-Identifier: Apache-2.0
"""What the scheduler says of itself: why nothing begins, and what became of trajectories, groups and tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from remote_fakes import make_source
from scripted_pool import SOON, ScriptedPool, new_ledger, new_scheduler, settled

from recipe.async_engine.core.prompt_manager import Why
from recipe.async_engine.record.events import GROUPS, TRAJECTORIES, Class, Event
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.rollout.worker_pool import TrajectoryFailed


@pytest.fixture
def running() -> Iterator[list[RolloutScheduler]]:
    schedulers: list[RolloutScheduler] = []
    yield schedulers
    for scheduler in schedulers:
        scheduler.stop(SOON)


def whys(scheduler: RolloutScheduler) -> list[str]:
    """What its lane has been since it was asked last."""
    settled(scheduler)
    return [span.what for span in scheduler._books.lane.take()]


def test_lane_says_why_nothing_begins(running: list[RolloutScheduler]) -> None:
    pool = ScriptedPool()
    scheduler = new_scheduler(new_ledger(b=1, bound=0, depth=0, target=2), make_source(8), pool)
    running.append(scheduler)
    scheduler._books.lane.take()
    scheduler.start()
    first = pool.of(0)
    # There are slots for more, and the gate has none.
    assert whys(scheduler) == [Class.START_UP, Why.PROMPTS, Why.LAST_OF_GATE]
    taking = threading.Thread(target=scheduler.take_batch, args=[SOON])
    taking.start()
    first.generate()
    settled(scheduler)
    assert whys(scheduler)[-1] == Why.REWARD
    first.reward()
    taking.join(SOON)
    # The gate admits the next version's prompts only.
    assert whys(scheduler)[-1] == Why.GATE
    scheduler.batch_trained()
    scheduler.version_sealed()
    scheduler.pause_until_drained(SOON)
    assert whys(scheduler)[-1] == Why.DRAIN
    scheduler.version_announced()
    scheduler.end_drain()
    pool.of(1).finish()
    assert scheduler.take_batch(SOON) is not None
    assert whys(scheduler)[-1] == Why.END


def test_lane_says_whether_slots_or_something_else_keeps_others_from_beginning(
    running: list[RolloutScheduler],
) -> None:
    pool = ScriptedPool()
    scheduler = new_scheduler(new_ledger(b=1, bound=8, depth=8, target=4), make_source(3), pool, slots=2)
    running.append(scheduler)
    scheduler._books.lane.take()
    scheduler.start()
    pool.of(1)
    assert whys(scheduler)[-1] == Why.GENERATING
    pool.of(0).finish()
    pool.of(1).finish()
    pool.of(2)
    settled(scheduler)
    # The data has no more.
    assert whys(scheduler)[-1] == Why.LAST_OF_END
    assert scheduler.take_batch(SOON) is not None
    drain = threading.Thread(target=scheduler.pause_until_drained, args=[SOON])
    drain.start()
    until(lambda: whys(scheduler)[-1:] == [Why.LAST_OF_DRAIN])
    pool.of(2).finish()
    drain.join(SOON)
    assert whys(scheduler)[-1] == Why.DRAIN


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_attempts_and_groups_are_told_with_their_end(running: list[RolloutScheduler]) -> None:
    pool, told = ScriptedPool(), list[Event]()
    scheduler = new_scheduler(new_ledger(b=1, target=1), make_source(8), pool, tell=told.append)
    running.append(scheduler)
    scheduler.start()
    pool.of(0).fail(TrajectoryFailed("once"))
    pool.of(0, attempt=1).finish()
    assert scheduler.take_batch(SOON) is not None
    scheduler.batch_trained()
    attempts = [event for event in told if (event.lane, event.what) == (TRAJECTORIES, "generating")]
    assert [(event.tokens, event.text) for event in attempts] == [
        (None, "attempt 1, without a reward"),
        (6, "attempt 2"),
    ]
    assert [(event.what, event.tokens) for event in told if event.lane == GROUPS] == [("ready", None), ("trained", 6)]
    assert all(event.start <= event.end and event.group == 0 for event in told)


def test_books_close_over_groups_that_were_trained_failed_wait_and_run(running: list[RolloutScheduler]) -> None:
    pool = ScriptedPool()
    ledger = new_ledger(b=1, bound=8, depth=8)
    scheduler = new_scheduler(ledger, make_source(8), pool, slots=4, retries=0, failures=9)
    running.append(scheduler)
    scheduler.start()
    for group in (0, 1):
        pool.of(group).finish()
    pool.of(2).fail(TrajectoryFailed("for good"))
    pool.of(6)
    assert scheduler.take_batch(SOON) is not None
    scheduler.batch_trained()
    settled(scheduler)
    before = ledger.counts()
    # Two answers of 6 tokens were complete, one failed without any, and the others have 2 each.
    unfinished = 2 * (before.issued - 3)
    engines = {"sampled": 12 + unfinished, "answered": 12 + unfinished, "under_way": 0}
    books = scheduler.close_books(lambda: engines, SOON)
    assert (books.sampled, books.trained, books.in_flight) == (12 + unfinished, 6, 6 + unfinished)
    assert books.not_known == 0
    after = ledger.counts()
    assert (after.failed, after.live) == (before.failed, before.live), "ending the run fails no group"

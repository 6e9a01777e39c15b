# SPDX-License-Identifier: Apache-2.0
"""The scheduler of generation in turns, over workers faked below the actor seam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from remote_fakes import make_source
from scripted_pool import SOON, ScriptedPool, new_ledger, wait_until

from recipe.async_engine.core.groups import GroupState
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import Turns
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.group_run import SchedulerSettings, TrajectoryScored
from recipe.async_engine.rollout.kept_answers import TokenAccount, TrajectoryRecord
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.rollout.worker_pool import TrajectoryFailed


def record(tokens: int) -> TrajectoryRecord:
    """What a worker exports of an answer that was cut after so many tokens."""
    return TrajectoryRecord(b"", tokens, 0)


class TurnPoolFake(ScriptedPool):
    """Records what the scheduler tells the workers about turns."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__(answer)
        self.told: list[str] = []

    async def go_on(self) -> None:
        self.told.append("go on")

    async def hold(self, timeout_s: float) -> TokenAccount:
        self.told.append("hold")
        return self.account


def new_turns(
    ledger: SampleLedger,
    pool: TurnPoolFake,
    *,
    slots: int = 4,
    size: int = 2,
    retries: int = 1,
    source: PromptSource | None = None,
) -> RolloutScheduler:
    ticks = iter(range(10**9))
    settings = SchedulerSettings(size, slots, retries, 2)
    scheduler = RolloutScheduler(
        ledger, source or make_source(16), pool, settings, Timeline(lambda: float(next(ticks)), slots)
    )
    scheduler.use_places(0, 0.0, SOON)
    return scheduler


def open_turn(scheduler: RolloutScheduler, slots: int = 4) -> None:
    scheduler.use_places(slots, 1.0, SOON)


def end_turn(scheduler: RolloutScheduler) -> None:
    held = scheduler.use_places(0, 0.0, SOON)
    assert held is not None
    held.result(SOON)


@pytest.fixture
def start() -> Iterator[Any]:
    running: list[RolloutScheduler] = []

    def begin(scheduler: RolloutScheduler) -> RolloutScheduler:
        running.append(scheduler)
        scheduler.start()
        return scheduler

    yield begin
    for scheduler in running:
        scheduler.stop(SOON)


def end(scheduler: RolloutScheduler) -> list[int]:
    """Take the batch, close the turn, train and publish; the group ids."""
    batch = scheduler.take_batch(SOON)
    assert batch is not None
    end_turn(scheduler)
    scheduler.batch_trained()
    scheduler.version_sealed()
    scheduler.version_announced()
    return [run.group.id for run in batch]


def test_nothing_begins_before_the_first_turn_or_between_two(start: Any) -> None:
    pool = TurnPoolFake()
    scheduler = start(new_turns(new_ledger(b=1, bound=2, depth=2, policy=Turns()), pool))
    scheduler.snapshot(SOON)
    assert not pool.calls
    open_turn(scheduler)
    pool.began(4)
    pool.of(0, 0).finish()
    pool.of(0, 1).finish()
    assert end(scheduler) == [0]
    began = len(pool.calls)
    scheduler.snapshot(SOON)
    assert len(pool.calls) == began
    assert pool.told == ["go on", "hold"]


def test_interrupted_trajectories_go_on_in_the_next_turn_before_new_prompts(start: Any) -> None:
    pool = TurnPoolFake()
    scheduler = start(new_turns(new_ledger(b=1, bound=2, depth=2, policy=Turns()), pool, slots=4))
    open_turn(scheduler)
    pool.began(4)
    pool.of(0, 0).finish()
    pool.of(0, 1).finish()
    assert end(scheduler) == [0]
    waiting = pool.of(1, 0), pool.of(1, 1)
    assert scheduler.metrics()["partial_rollout/trajectories_interrupted"] >= 2
    open_turn(scheduler)
    wait_until(scheduler, lambda: pool.told == ["go on", "hold", "go on"])
    assert not any(call.cancelled for call in waiting)
    assert scheduler.manager.running == 4, "what was interrupted has its slots still"
    pool.of(1, 0).finish()
    pool.of(1, 1).finish()
    assert end(scheduler) == [1]


def test_a_slot_is_given_away_trajectory_by_trajectory(start: Any) -> None:
    pool = TurnPoolFake()
    scheduler = start(new_turns(new_ledger(b=2, bound=1, depth=1, policy=Turns()), pool, slots=3))
    open_turn(scheduler)
    assert [call.key for call in pool.began(3)] == ["0-0-0", "0-1-0", "1-0-0"]
    pool.of(0, 1).generate()
    assert [call.key for call in pool.began(4)][3] == "1-1-0"


def test_an_answer_that_ends_as_its_turn_is_closed_is_complete(start: Any) -> None:
    pool = TurnPoolFake()
    scheduler = start(new_turns(new_ledger(b=1, bound=2, depth=1, policy=Turns()), pool, slots=4))
    open_turn(scheduler)
    pool.began(4)
    pool.of(0, 0).finish()
    pool.of(0, 1).finish()
    end(scheduler)
    pool.of(1, 0).finish()
    pool.of(1, 1).finish()
    wait_until(scheduler, lambda: scheduler.ledger.counts().ready == 1)
    open_turn(scheduler)
    assert end(scheduler) == [1]


def test_a_failed_attempt_is_followed_by_the_next_one_in_its_slot(start: Any) -> None:
    pool = TurnPoolFake()
    scheduler = start(new_turns(new_ledger(b=1, bound=2, depth=1, policy=Turns()), pool, slots=4))
    open_turn(scheduler)
    pool.began(4)
    pool.of(0, 0).finish()
    pool.of(0, 1).finish()
    end(scheduler)
    pool.of(1, 0).fail(TrajectoryFailed("its worker died"))
    again = pool.of(1, 0, attempt=1)
    assert again.avoid == "worker-0"
    open_turn(scheduler)
    again.finish()
    pool.of(1, 1).finish()
    assert end(scheduler) == [1]


def test_a_group_that_fails_for_good_gives_its_slots_back(start: Any) -> None:
    pool = TurnPoolFake()
    scheduler = start(new_turns(new_ledger(b=1, bound=1, depth=0, policy=Turns()), pool, slots=2, retries=0))
    open_turn(scheduler)
    pool.began(2)
    pool.of(0, 0).fail(TrajectoryFailed("no answer"))
    pool.of(1, 0).finish()
    pool.of(1, 1).finish()
    assert pool.saw_cancel(pool.of(0, 1))
    assert end(scheduler) == [1]
    counts = scheduler.ledger.counts()
    assert (counts.issued, counts.trained, counts.failed, counts.live) == (2, 1, 1, 0)


def test_a_restored_scheduler_goes_on_with_what_was_kept(start: Any) -> None:
    pool = TurnPoolFake()
    scheduler = start(new_turns(new_ledger(b=1, bound=2, depth=2, policy=Turns()), pool, slots=6))
    open_turn(scheduler)
    pool.began(6)
    for n in (0, 1):
        pool.of(0, n).finish()
    assert end(scheduler) == [0]
    pool.of(1, 0).finish()
    wait_until(scheduler, lambda: scheduler._runs[1].trajectories[0].payload is not None)
    pool.kept = {"1-1-0": record(5), "2-0-0": record(3), "2-1-0": None}
    pool.account = TokenAccount(cut=8)
    saved = scheduler.snapshot(SOON)
    assert saved["interrupted_tokens"] == {"cut": 8, "trained": 0, "lost": 0, "cached": 8}

    ledger = SampleLedger.restore(saved["ledger"], scheduler.ledger.settings, policy=Turns())
    assert [group.start for group in ledger.in_state(GroupState.RUNNING)] == [0, 0]
    fresh = TurnPoolFake()
    source = make_source(16)
    source.restore(saved["source"])
    restored = new_turns(ledger, fresh, slots=6, source=source)
    restored.restore_groups(saved["groups"])
    start(restored)
    open_turn(restored)
    began = {call.key for call in fresh.began(5)}
    # What waits goes first: two records, then the one that had no token yet, then a new prompt.
    assert began == {"1-1-0", "2-0-0", "2-1-0", "3-0-0", "3-1-0"}
    assert [call.key for call in fresh.calls][:3] == ["1-1-0", "2-0-0", "2-1-0"]
    assert fresh.records["1-1-0"] == record(5)
    assert fresh.records["2-1-0"] is None
    fresh.of(1, 1).finish(version=0)
    assert end(restored) == [1]


def test_a_payload_on_its_way_when_the_workers_tell_what_they_keep_is_in_the_snapshot(start: Any) -> None:
    pool = TurnPoolFake()
    scheduler = start(new_turns(new_ledger(b=1, bound=2, depth=1, policy=Turns()), pool, slots=4))
    open_turn(scheduler)
    pool.began(4)
    pool.of(0, 0).finish()
    pool.of(0, 1).finish()
    end(scheduler)
    pool.kept, pool.over = {"1-1-0": None}, {"1-0-0"}
    exported = pool.export

    async def export_then_finish(timeout_s: float) -> Any:
        pool.of(1, 0).finish()
        return await exported(timeout_s)

    pool.export = export_then_finish
    saved = scheduler.snapshot(SOON)["groups"][1]
    assert saved["payloads"] == ["payload-1-0-0", None]


def test_a_group_whose_last_payload_came_with_the_checkpoint_is_ready_after_it() -> None:
    pool = TurnPoolFake()
    first = new_turns(new_ledger(b=1, bound=1, policy=Turns()), pool)
    first.manager.open()
    group = first.manager.issue(make_source(1).take().reference)
    ledger = SampleLedger.restore(first.ledger.snapshot(), first.ledger.settings, policy=Turns())
    restored = new_turns(ledger, TurnPoolFake())
    scored = [TrajectoryScored(1.0, 0, 0, True, 0, 0, 6)] * 2
    saved = {"row": {}, "scored": scored, "payloads": ["a", "b"], "kept": [None, None]}
    restored.restore_groups({group.id: saved})
    assert ledger.counts().ready == 1
    assert ledger.next_batch() is not None


def test_answers_that_are_lost_are_generated_again_in_the_next_turn(start: Any) -> None:
    pool = TurnPoolFake()
    scheduler = start(new_turns(new_ledger(b=1, bound=1, depth=0, policy=Turns()), pool, slots=2))
    open_turn(scheduler)
    for n in (0, 1):
        pool.of(0, n).finish()
    (run,) = scheduler.take_batch(SOON)
    end_turn(scheduler)
    scheduler.payloads_lost([run.group.id])
    open_turn(scheduler)
    pool.began(4)
    for call in pool.calls[2:]:
        call.finish()
    assert end(scheduler) == [0]

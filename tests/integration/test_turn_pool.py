# SPDX-License-Identifier: Apache-2.0
"""The pool of agent-loop workers in turns over a real Ray actor that dies and is started again."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest
import ray

from recipe.async_engine.actors.worker_set import WorkerRestarted
from recipe.async_engine.core.groups import Group
from recipe.async_engine.core.prompts import PromptRef
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.trajectory_events import TrajectoryScored
from recipe.async_engine.rollout.worker_pool import TrajectoryCall, TrajectoryFailed, WorkerPool

SOON = 60.0


def actor_class() -> type:
    # Made in a function, so that Ray sends it by value: its processes cannot import test modules.
    from recipe.async_engine.rollout import kept_answers
    from recipe.async_engine.rollout import trajectory_worker as events

    class Worker:
        """Its payloads say which turn a trajectory began in, and which turns were over for the worker by then."""

        def __init__(self) -> None:
            self.closed: list[int] = []

        async def run_trajectory(
            self, key: str, sample: dict, index: int, n: int, version: int, *rest: Any
        ) -> tuple[Any, Any]:
            if sample["behaviour"] == "dies":
                os._exit(1)
            return events.TrajectoryScored(0.5, version, version, True, 0, 0, 6), (*rest, self.closed)

        async def process(self) -> int:
            return os.getpid()

        async def resume(self, keys: list[str], turn: int) -> None:
            pass

        async def end_turn(self, turn: int) -> Any:
            self.closed.append(turn)
            return kept_answers.TokenAccount(cut=10 * len(self.closed), lost=1, held=4)

    return Worker


def call_in(pool: WorkerPool, turn: int, behaviour: str = "", n: int = 0) -> TrajectoryCall:
    row = {"behaviour": np.array([behaviour], dtype=object), "dataset_index": np.array([4])}
    return pool.call(row, Group(7, PromptRef(4, 1, "1-4"), start=3), n, 0, None, turn=turn)


async def test_call_that_waited_for_its_worker_over_a_turn_begins_in_a_later_one(
    cluster: None,
) -> None:
    pool = WorkerPool([ray.remote(max_restarts=1)(actor_class()).remote()])
    assert await pool.end_turn(1, SOON) == TokenAccount(cut=10, lost=1, held=4)
    with pytest.raises(TrajectoryFailed, match="died"):
        async for _ in call_in(pool, 2, "dies").events():
            pass
    waiting = call_in(pool, 2)

    async def follow() -> list[tuple[Any, Any]]:
        return [event async for event in waiting.events()]

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    # Nobody is there to ask; what the dead one counted is kept, and what it held is lost.
    assert await pool.end_turn(2, SOON) == TokenAccount(cut=10, lost=5)
    pool.resume([waiting], 3)
    (scored, _), (_, payload) = await asyncio.wait_for(following, SOON)
    assert isinstance(scored, TrajectoryScored)
    assert ray.get(payload, timeout=SOON) == (None, 3, True, False, [2])
    assert await pool.end_turn(3, SOON) == TokenAccount(cut=30, lost=6, held=4)


async def test_account_of_a_worker_that_died_with_no_work_is_kept_once(cluster: None) -> None:
    actor = ray.remote(max_restarts=1)(actor_class()).remote()
    pool = WorkerPool([actor])
    await pool.end_turn(1, SOON)
    before = await pool.end_turn(2, SOON)
    assert before == TokenAccount(cut=20, lost=1, held=4)
    os.kill(await actor.process.remote(), signal.SIGKILL)
    while (account := await pool.end_turn(2, SOON)) == before:
        await asyncio.sleep(0.1)
    # Nobody has noticed but by its counts, which begin again.
    held_as_lost = TokenAccount(cut=20, lost=5)
    assert account == held_as_lost + TokenAccount(cut=10, lost=1, held=4)
    pool.died("worker-0", 0, WorkerRestarted())
    while not pool.alive:
        await asyncio.sleep(0.1)
    # Asked for the third time: it was told once more that the turn is over.
    assert await pool.end_turn(2, SOON) == held_as_lost + TokenAccount(cut=30, lost=1, held=4)

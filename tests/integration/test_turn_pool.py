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
from recipe.async_engine.core.groups import Group, PromptRef
from recipe.async_engine.rollout.group_run import GroupRun, TrajectoryFailed, TrajectoryRun
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.worker_pool import WorkerPool

SOON = 60.0


def actor_class() -> type:
    # Made in a function, so that Ray sends it by value: its processes cannot import test modules.
    from recipe.async_engine.rollout import kept_answers
    from recipe.async_engine.rollout import trajectory_worker as events

    class Worker:
        """Its payloads say how often it was told to hold requests, and to let them go on."""

        def __init__(self) -> None:
            self.held = self.went_on = 0

        async def run_trajectory(
            self, key: str, sample: dict, index: int, n: int, version: int, *rest: Any
        ) -> tuple[Any, Any]:
            if sample["behaviour"] == "dies":
                os._exit(1)
            return events.TrajectoryScored(0.5, version, version, True, 0, 0, 6), (self.held, self.went_on)

        async def process(self) -> int:
            return os.getpid()

        async def go_on(self) -> None:
            self.went_on += 1

        async def hold(self) -> Any:
            self.held += 1
            return kept_answers.TokenAccount(cut=10 * self.held, lost=1, held=4)

    return Worker


def call_of(pool: WorkerPool, behaviour: str = "") -> TrajectoryRun:
    row = {"behaviour": np.array([behaviour], dtype=object), "dataset_index": np.array([4])}
    run = GroupRun(Group(7, PromptRef(4, 1, "1-4"), start=3), row, 1).trajectories[0]
    pool.assign(run)
    return run


async def test_worker_that_is_started_again_between_two_turns_is_told_to_hold_its_requests(
    cluster: None,
) -> None:
    pool = WorkerPool([ray.remote(max_restarts=1)(actor_class()).remote()])
    assert await pool.hold(SOON) == TokenAccount(cut=10, lost=1, held=4)
    with pytest.raises(TrajectoryFailed, match="died"):
        await pool.attempt(call_of(pool, "dies"), lambda: None)
    waiting = call_of(pool)
    following = asyncio.create_task(pool.attempt(waiting, lambda: None))
    await asyncio.sleep(0)
    # Nobody is there to ask; what the dead one counted is kept, and what it held is lost.
    assert await pool.hold(SOON) == TokenAccount(cut=10, lost=5)
    await asyncio.wait_for(following, SOON)
    assert waiting.scored is not None
    assert ray.get(waiting.payload, timeout=SOON) == (1, 0)
    assert await pool.hold(SOON) == TokenAccount(cut=30, lost=6, held=4)


async def test_account_of_a_worker_that_died_with_no_work_is_kept_once(cluster: None) -> None:
    actor = ray.remote(max_restarts=1)(actor_class()).remote()
    pool = WorkerPool([actor])
    await pool.hold(SOON)
    before = await pool.hold(SOON)
    assert before == TokenAccount(cut=20, lost=1, held=4)
    os.kill(await actor.process.remote(), signal.SIGKILL)
    while (account := await pool.hold(SOON)) == before:
        await asyncio.sleep(0.1)
    # Nobody has noticed but by its counts, which begin again.
    held_as_lost = TokenAccount(cut=20, lost=5)
    assert account == held_as_lost + TokenAccount(cut=10, lost=1, held=4)
    pool.died("worker-0", 0, WorkerRestarted())
    while not pool.alive:
        await asyncio.sleep(0.1)
    # Asked for the third time: it was told once more that the turn is over.
    assert await pool.hold(SOON) == held_as_lost + TokenAccount(cut=30, lost=1, held=4)

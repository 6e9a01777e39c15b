# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Calls of reward workers, which are objects of this process."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from remote_fakes import Handle

from recipe.async_engine.rewards.dispatch import LeastBusyWorker, NoRewardWorker


class Worker:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[dict[str, Any]]] = []

    def compute_score(self, data: Any) -> asyncio.Future[dict[str, Any]]:
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]


async def begin(dispatch: LeastBusyWorker, calls: int) -> list[asyncio.Task]:
    """As verl does: one of a list of handles, at random."""
    handles = [dispatch]
    tasks = [asyncio.ensure_future(random.choice(handles).compute_score.remote(number)) for number in range(calls)]
    await asyncio.sleep(0)
    return tasks


async def test_call_goes_to_the_worker_that_has_the_fewest() -> None:
    workers = [Worker() for _ in range(3)]
    dispatch = LeastBusyWorker([Handle(worker) for worker in workers])
    tasks = await begin(dispatch, 6)
    assert [len(worker.waiting) for worker in workers] == [2, 2, 2]
    for answer in workers[1].waiting:
        answer.set_result({"reward_score": 1.0})
    await asyncio.sleep(0.01)
    tasks += await begin(dispatch, 2)
    assert [len(worker.waiting) for worker in workers] == [2, 4, 2]
    assert sum(task.done() for task in tasks) == 2
    for task in tasks:
        task.cancel()


async def test_dead_worker_is_asked_no_more_and_its_caller_gets_the_error() -> None:
    dead, alive = Worker(), Worker()
    dispatch = LeastBusyWorker([Handle(dead), Handle(alive)])
    first, second = await begin(dispatch, 2)
    dead.waiting[0].set_exception(ActorDiedError())
    with pytest.raises(ActorDiedError):
        await first
    again = await begin(dispatch, 2)
    assert (len(dead.waiting), len(alive.waiting)) == (1, 3)
    for answer in alive.waiting:
        answer.set_result({"reward_score": 0.5})
    assert [await task for task in (second, *again)] == [{"reward_score": 0.5}] * 3


async def test_without_any_worker_the_call_says_so() -> None:
    dead = Worker()
    dispatch = LeastBusyWorker([Handle(dead)])
    (first,) = await begin(dispatch, 1)
    dead.waiting[0].set_exception(ActorDiedError())
    with pytest.raises(ActorDiedError):
        await first
    with pytest.raises(NoRewardWorker):
        await dispatch.compute_score.remote(None)

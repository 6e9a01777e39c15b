# SPDX-License-Identifier: Apache-2.0
"""Calls of reward workers, which are objects of this process; one that dies under Ray and is started again."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnavailableError
from remote_fakes import Handle
from surroundings import has_ended
from tensordict import TensorDict
from verl import DataProto

from recipe.async_engine.actors import control
from recipe.async_engine.actors.worker_set import WorkerDied
from recipe.async_engine.rewards import scoring_worker as dispatch_module
from recipe.async_engine.rewards.in_transit import InTransit
from recipe.async_engine.rewards.pool import RewardFailed
from recipe.async_engine.rewards.scoring_worker import ScoringManager, least_busy_worker


class Worker:
    """Answers when it is told to; ``states``: what Ray says when it is asked whether a dead one is up."""

    def __init__(self, *states: Exception | None) -> None:
        self.waiting: list[asyncio.Future[dict[str, Any]]] = []
        self.states = list(states)

    def __ray_ready__(self) -> None:
        if (state := self.states.pop(0)) is not None:
            raise state

    def compute_score(self, data: Any) -> asyncio.Future[dict[str, Any]]:
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]


def answer(mark: str = "") -> DataProto:
    """What verl's agent-loop worker has scored; the tokens are of two turns."""
    tensors = {"responses": torch.tensor([[1, 2], [3, 0]]), "position_ids": torch.arange(12).reshape(2, 3, 2)}
    texts = np.array([[{"role": "user", "content": "1 + 1"}]] * 2 + [None], dtype=object)[:2]
    return DataProto(TensorDict(tensors, batch_size=2), {"mark": np.array([mark] * 2), "raw_prompt": texts}, {"k": 1})


def test_answer_travels_as_it_is_and_may_be_written_to() -> None:
    sent, frozen = answer("kept"), []
    stream = cloudpickle.dumps(InTransit(sent), protocol=5, buffer_callback=frozen.append)
    arrived = pickle.loads(stream, buffers=[buffer.raw().toreadonly() for buffer in frozen])
    assert type(arrived) is DataProto and len(arrived) == 2 and arrived.meta_info == {"k": 1}
    assert set(arrived.batch.keys()) == set(sent.batch.keys())
    for name, value in sent.batch.items():
        assert torch.equal(arrived.batch[name], value) and arrived.batch[name].dtype == value.dtype
        arrived.batch[name].zero_()
    assert arrived[1].non_tensor_batch["mark"] == "kept"
    assert arrived.non_tensor_batch["raw_prompt"].tolist() == sent.non_tensor_batch["raw_prompt"].tolist()
    assert sent.batch["responses"].any()


class Marked(DataProto):
    """A subclass, as a project may have one."""


def odd(kind: str) -> Any:
    sent = answer()
    if kind == "bfloat16":
        sent.batch["scores"] = torch.ones(2, 2, dtype=torch.bfloat16)
    elif kind == "nested":
        sent.batch["nested"] = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)
    elif kind == "no tensors":
        sent = DataProto(None, sent.non_tensor_batch, sent.meta_info)
    elif kind == "subclass":
        sent = Marked(sent.batch, sent.non_tensor_batch, sent.meta_info)
    return sent if kind != "other" else {"prompt": "1 + 1"}


@pytest.mark.parametrize("kind", ["bfloat16", "nested", "no tensors", "subclass", "other"])
def test_what_arrays_cannot_say_travels_as_it_is(kind: str) -> None:
    sent = odd(kind)
    arrived = pickle.loads(cloudpickle.dumps(InTransit(sent), protocol=5))
    assert type(arrived).__name__ == type(sent).__name__
    if not isinstance(sent, DataProto):
        assert arrived == sent
        return
    assert arrived.non_tensor_batch["raw_prompt"].tolist() == sent.non_tensor_batch["raw_prompt"].tolist()
    for name, value in ({} if sent.batch is None else sent.batch).items():
        came = arrived.batch[name]
        pairs = zip(value.unbind(), came.unbind(), strict=True)
        assert came.dtype == value.dtype and all(torch.equal(left, right) for left, right in pairs)


async def begin(dispatch: Any, calls: int) -> list[asyncio.Task]:
    """As verl does: one of a list of handles, at random."""
    handles = [dispatch]
    tasks = [asyncio.ensure_future(random.choice(handles).compute_score.remote(number)) for number in range(calls)]
    await asyncio.sleep(0)
    return tasks


async def test_call_goes_to_the_worker_that_has_the_fewest() -> None:
    workers = [Worker() for _ in range(3)]
    dispatch = least_busy_worker([Handle(worker) for worker in workers])
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


async def test_worker_whose_calls_fail_at_once_is_not_preferred_for_being_idle() -> None:
    """The broken one is always idle, the other has ever more calls."""

    class Broken(Worker):
        calls = 0

        def compute_score(self, data: Any) -> asyncio.Future[dict[str, Any]]:
            self.calls += 1
            failed: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            failed.set_exception(RuntimeError("its pool is broken"))
            return failed

    broken, sound = Broken(), Worker()
    dispatch = least_busy_worker([Handle(broken), Handle(sound)])
    tasks = [(await begin(dispatch, 1))[0] for _ in range(200)]
    assert broken.calls <= 10
    assert len(sound.waiting) == 200 - broken.calls
    for waiting in sound.waiting:
        waiting.set_result({"reward_score": 1.0})
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results.count({"reward_score": 1.0}) == 200 - broken.calls


async def test_worker_that_failed_once_has_its_share_again() -> None:
    workers = [Worker(), Worker()]
    dispatch = least_busy_worker([Handle(worker) for worker in workers])
    (failed,) = await begin(dispatch, 1)
    workers[0].waiting[0].set_exception(ValueError("one answer"))
    with pytest.raises(ValueError, match="one answer"):
        await failed
    tasks = await begin(dispatch, 10)
    assert [len(worker.waiting) for worker in workers] == [6, 5]
    for task in tasks:
        task.cancel()


async def test_dead_worker_is_asked_no_more_and_its_caller_gets_the_error() -> None:
    dead, alive = Worker(ActorDiedError()), Worker()
    dispatch = least_busy_worker([Handle(dead), Handle(alive)])
    first, second = await begin(dispatch, 2)
    dead.waiting[0].set_exception(ActorDiedError())
    with pytest.raises(WorkerDied):
        await first
    again = await begin(dispatch, 2)
    assert (len(dead.waiting), len(alive.waiting)) == (1, 3)
    for answer in alive.waiting:
        answer.set_result({"reward_score": 0.5})
    assert [await task for task in (second, *again)] == [{"reward_score": 0.5}] * 3


async def test_without_any_worker_the_call_says_so() -> None:
    dead = Worker(ActorDiedError())
    dispatch = least_busy_worker([Handle(dead)])
    (first,) = await begin(dispatch, 1)
    dead.waiting[0].set_exception(ActorDiedError())
    with pytest.raises(WorkerDied):
        await first
    with pytest.raises(RewardFailed):
        await dispatch.compute_score.remote(None)


async def test_calls_wait_for_a_worker_that_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ASK_AGAIN_S", 0.01)
    worker = Worker(ActorUnavailableError("", None), ActorUnavailableError("", None), None)
    dispatch = least_busy_worker([Handle(worker)])
    tasks = await begin(dispatch, 2)
    for waiting in worker.waiting:
        waiting.set_exception(ActorUnavailableError("", None))
    assert [type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == [WorkerDied] * 2
    (again,) = await begin(dispatch, 1)
    assert len(worker.waiting) == 2
    await asyncio.sleep(0.1)
    assert worker.states == []
    worker.waiting[2].set_result({"reward_score": 1.0})
    assert await again == {"reward_score": 1.0}


async def test_worker_that_dies_under_ray_is_asked_again_once_it_is_up(cluster: None) -> None:
    class Dying:  # made here, so that Ray sends it by value: its processes cannot import test modules
        async def compute_score(self, data: Any) -> dict[str, Any]:
            if data.non_tensor_batch["mark"][0] == "dies":
                os._exit(1)
            return {"pid": os.getpid()}

    actor = ray.remote(max_restarts=1)(Dying).remote()
    dispatch = least_busy_worker([actor])
    first = await asyncio.wait_for(dispatch.compute_score.remote(answer()), 60)
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(dispatch.compute_score.remote(answer("dies")), 60)
    second = await asyncio.wait_for(dispatch.compute_score.remote(answer()), 60)
    assert second["pid"] != first["pid"]
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(dispatch.compute_score.remote(answer("dies")), 60)
    with pytest.raises(RewardFailed):
        await asyncio.wait_for(dispatch.compute_score.remote(answer()), 60)


async def test_worker_whose_call_is_given_up_is_asked_again_once_it_answers() -> None:
    slow, other = Worker(None), Worker()
    dispatch = least_busy_worker([Handle(slow), Handle(other)])
    first, _ = await begin(dispatch, 2)
    first.cancel()
    await asyncio.wait([first])
    # It has not been heard yet.
    tasks = await begin(dispatch, 1)
    assert (len(slow.waiting), len(other.waiting)) == (1, 2)
    await asyncio.sleep(0.01)
    assert slow.states == []
    tasks += await begin(dispatch, 2)
    assert len(slow.waiting) >= 2
    for task in tasks:
        task.cancel()


async def test_stopped_worker_is_set_aside_and_started_again(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "REWARD_WORKER_S", 2.0)

    class Scoring:  # see above
        async def compute_score(self, data: Any) -> dict[str, Any]:
            return {"pid": os.getpid()}

    actors = [ray.remote(max_restarts=1)(Scoring).remote() for _ in range(2)]
    dispatch = least_busy_worker(actors)
    pids = {(await asyncio.wait_for(dispatch.compute_score.remote(answer()), 60))["pid"] for _ in range(4)}
    assert len(pids) == 2
    stopped = min(pids)
    os.kill(stopped, signal.SIGSTOP)
    given_up, began = 0, time.monotonic()
    for _ in range(6):
        try:
            scored = await asyncio.wait_for(dispatch.compute_score.remote(answer()), 3)
            assert scored["pid"] != stopped
        except TimeoutError:
            given_up += 1
    # One call found it out, all others went elsewhere.
    assert given_up <= 1
    while not has_ended(stopped):
        assert time.monotonic() - began < 120
        await asyncio.sleep(0.1)
    now = set()
    while len(now) < 2:
        assert time.monotonic() - began < 240
        now.add((await asyncio.wait_for(dispatch.compute_score.remote(answer()), 60))["pid"])
    assert stopped not in now


def test_counts_of_a_worker_that_was_started_again_go_on(cluster: None) -> None:
    of_two = {"pending": 2, "scored": 5, "failed": 1, "timed_out": 0, "died": 0, "seconds": 2.5}
    of_one = {"pending": 1, "scored": 4, "failed": 0, "timed_out": 0, "died": 0, "seconds": 2.0}
    again = {"pending": 0, "scored": 1, "failed": 0, "timed_out": 0, "died": 0, "seconds": 0.5}
    told = [iter([(10, dict(of_two)), (12, again), (12, again)]), iter([(11, dict(of_one))] * 3)]

    def worker(answers: Any) -> Any:
        return SimpleNamespace(pool_stats=SimpleNamespace(remote=lambda: ray.put(next(answers))))

    manager = ScoringManager.__new__(ScoringManager)
    manager._asked, manager._counts, manager.reward_loop_workers = [], {}, [worker(answers) for answers in told]
    assert set(manager.metrics().values()) == {0}, "nothing is known before the first answers"
    manager.metrics()
    counts = {"pending": 1, "scored": 10, "failed": 1, "timed_out": 0, "died": 0, "seconds": 5.0}
    expected = {f"fully_async/rewards/{name}": value for name, value in {**counts, "worker_restarts": 1}.items()}
    assert manager.metrics() == expected

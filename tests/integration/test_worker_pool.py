# SPDX-License-Identifier: Apache-2.0
"""The pool of agent-loop workers over real Ray actors whose trajectories are a few lines each."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import traceback
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import ray

from recipe.async_engine.core.groups import Group, PromptRef
from recipe.async_engine.rollout.group_run import (
    GroupRun,
    RolloutFailed,
    TrajectoryCancelled,
    TrajectoryDisturbed,
    TrajectoryFailed,
    TrajectoryRun,
    TrajectoryScored,
)
from recipe.async_engine.rollout.trajectory_manager import CALLS_AT_ONCE
from recipe.async_engine.rollout.trajectory_worker import RewardError
from recipe.async_engine.rollout.worker_pool import WorkerPool

SOON = 60.0


def actor_class() -> type:
    # Made in a function, so that Ray sends it by value: its processes cannot import test modules.
    from recipe.async_engine.actors import worker_set
    from recipe.async_engine.rollout import trajectory_worker as events

    class Worker:
        """Does what the sample's ``behaviour`` says."""

        def __init__(self) -> None:
            self.cancelled = asyncio.Event()
            self.prepared = self.is_broken = False
            self.begun: dict[str, tuple[Any, ...]] = {}

        async def run_trajectory(self, key: str, *arguments: Any) -> tuple[Any, Any]:
            self.begun[key] = arguments
            if arguments[0]["behaviour"] == "begins with an error":
                raise KeyError("a defect of the worker")
            if arguments[0]["behaviour"] == "reward is there at once":
                return await self.finish_trajectory(key)
            return None, None

        async def finish_trajectory(self, key: str) -> tuple[Any, Any]:
            sample, sample_index, rollout_n, version, *_ = self.begun.pop(key)
            behaviour = sample["behaviour"]
            if behaviour == "raises":
                failed = events.AgentLoopError("ValueError: no such tool")
                failed.add_note("Traceback of the agent loop")
                raise failed
            if behaviour == "is spoilt":
                raise worker_set.WorkerSpoilt("ValueError: no such tool, and torch.zeros is None")
            if behaviour == "breaks all calls":
                self.is_broken = True
                raise TypeError("'NoneType' object is not callable")
            if behaviour == "raises something else":
                raise KeyError("a defect of the worker")
            if behaviour == "works once it is prepared" and not self.prepared:
                raise worker_set.WorkerRestarted("started again")
            if behaviour == "reward fails":
                raise events.RewardError("the sandbox is down")
            if behaviour == "meets a dead actor":
                raise ray.exceptions.ActorDiedError()
            if behaviour == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if behaviour == "dies":
                os._exit(1)
            if behaviour == "waits":
                await asyncio.wait_for(self.cancelled.wait(), 60)
                raise events.TrajectoryCancelled(key)
            scored = events.TrajectoryScored(0.5, version, version, True, 0, 0, sample_index)
            return scored, {"sample": sample, "n": rollout_n}

        async def is_there(self) -> None:
            if self.is_broken:
                raise TypeError("'NoneType' object is not callable")

        async def rehearse(self) -> None:
            if self.is_broken:
                raise worker_set.WorkerSpoilt("torch.zeros is None")

        async def be_prepared(self) -> None:
            self.prepared = True

        async def cancel(self, keys: list[str]) -> None:
            self.cancelled.set()

    return Worker


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    remote = ray.remote(actor_class())
    return [remote.remote() for _ in range(2)]


@pytest.fixture
def pool(actors: list[Any]) -> WorkerPool:
    return WorkerPool(list(actors))


def call_of(
    pool: WorkerPool, behaviour: str = "", n: int = 0, avoid: str | None = None, alone: bool = False
) -> TrajectoryRun:
    """A trajectory whose next attempt is assigned."""
    row = {"behaviour": np.array([behaviour], dtype=object), "dataset_index": np.array([4])}
    group = GroupRun(Group(7, PromptRef(4, 1, "1-4"), start=3), row, n + 1)
    run = group.trajectories[n]
    run.errors = [TrajectoryDisturbed("it died")] * 2 * alone or [TrajectoryFailed("once")] * (avoid is not None)
    run.worker_id = avoid
    pool.assign(run)
    return run


async def ended(pool: WorkerPool, run: TrajectoryRun) -> tuple[list[str], TrajectoryRun]:
    """Whether it was said that it is sampled before it was scored, and the trajectory, whose attempt has ended."""
    said: list[str] = []
    await asyncio.wait_for(pool.attempt(run, lambda: said.append("sampled")), SOON)
    return said, run


async def test_last_token_is_told_of_first_and_the_payload_stays_a_reference(pool: WorkerPool) -> None:
    said, run = await ended(pool, call_of(pool, n=2))
    assert said == ["sampled"]
    assert run.scored == TrajectoryScored(0.5, 3, 3, True, 0, 0, 4)
    assert isinstance(run.payload, ray.ObjectRef)
    assert ray.get(run.payload, timeout=SOON) == {"sample": {"behaviour": "", "uid": "1-4"}, "n": 2}


async def test_answer_whose_reward_is_there_at_once_is_told_of_in_one_call(pool: WorkerPool) -> None:
    said, run = await ended(pool, call_of(pool, "reward is there at once"))
    assert said == []
    assert run.scored == TrajectoryScored(0.5, 3, 3, True, 0, 0, 4)
    assert ray.get(run.payload, timeout=SOON)["n"] == 0


async def test_large_prompt_goes_into_the_object_store_once_for_all_answers_to_it(pool: WorkerPool) -> None:
    image = np.random.default_rng(0).integers(0, 256, 1 << 20).astype(np.uint8)
    row = {"behaviour": np.array([""], dtype=object), "image": np.empty(1, dtype=object)}
    row["image"][0] = image
    runs = GroupRun(Group(7, PromptRef(4, 1, "1-4"), start=3), row, 4).trajectories
    for run in runs:
        pool.assign(run)
    sent: list[Any] = []

    async def attempt(run: TrajectoryRun) -> None:
        sent.append(pool.arguments(run)[1])
        await ended(pool, run)

    await asyncio.gather(*[attempt(run) for run in runs])
    assert isinstance(sent[0], ray.ObjectRef) and set(sent) == {sent[0]}
    for run in runs:
        assert np.array_equal(ray.get(run.payload, timeout=SOON)["sample"]["image"], image)
    assert not pool.users and not pool._samples, "it is kept as long as a trajectory of the group is under way"


@pytest.mark.parametrize(
    ("behaviour", "error", "text"),
    [
        ("raises", TrajectoryFailed, r"7-0-0 raised ValueError: no such tool"),
        ("raises something else", TrajectoryFailed, r"7-0-0 raised KeyError: 'a defect of the worker'"),
        ("reward fails", RewardError, "the sandbox is down"),
        ("meets a dead actor", TrajectoryFailed, "7-0-0 raised ActorDiedError"),
    ],
)
async def test_error_of_a_trajectory_arrives_as_the_recipes_own_and_costs_no_worker(
    pool: WorkerPool, behaviour: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        await ended(pool, call_of(pool, behaviour))
    assert type(caught.value) is error
    assert pool.alive == 2


async def test_error_that_was_handed_on_is_not_logged_by_ray_as_one_that_nobody_saw(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(ray._private.worker.logger, "error", lambda text, *_: logged.append(text))
    for behaviour in ("raises", "begins with an error"):
        with pytest.raises(TrajectoryFailed):
            await ended(pool, call_of(pool, behaviour))
    gc.collect()
    await asyncio.sleep(0.5)
    assert logged == []


async def test_traceback_of_an_agent_loop_reaches_whoever_reports_the_failure(pool: WorkerPool) -> None:
    with pytest.raises(TrajectoryFailed) as caught:
        await ended(pool, call_of(pool, "raises"))
    assert str(caught.value) == "trajectory 7-0-0 raised ValueError: no such tool"
    assert "Traceback of the agent loop" in "".join(traceback.format_exception(caught.value))


async def test_cancelled_trajectory_says_so_to_its_own_awaiter(pool: WorkerPool) -> None:
    run = call_of(pool, "waits")
    seen: list[Any] = []

    def sampled() -> None:
        seen.append(asyncio.get_running_loop().create_task(pool.cancel([run.key, "another-0-0"])))

    with pytest.raises(TrajectoryCancelled) as caught:
        await asyncio.wait_for(pool.attempt(run, sampled), SOON)
    assert type(caught.value) is TrajectoryCancelled
    assert len(seen) == 1


async def test_trajectories_spread_over_the_workers_and_a_retry_avoids_its_last_one(pool: WorkerPool) -> None:
    calls = []
    for n in range(4):
        calls.append(call_of(pool, n=n))
        pool.load[calls[-1].worker_id] += 1
    assert sorted(call.worker_id for call in calls) == ["worker-0", "worker-0", "worker-1", "worker-1"]
    for call in (calls[0], calls[2]):
        pool.load[call.worker_id] -= 1
    assert call_of(pool).worker_id == "worker-0"
    assert call_of(pool, avoid="worker-0").worker_id == "worker-1"


async def test_trajectory_that_is_to_be_alone_has_a_worker_for_itself(cluster: None) -> None:
    remote = ray.remote(actor_class())
    pool = WorkerPool([remote.remote() for _ in range(2)])
    first = call_of(pool, "waits")
    neighbour = asyncio.create_task(ended(pool, first))
    while first.key not in pool.under_way or not first.submitted:
        await asyncio.sleep(0.01)
    alone = call_of(pool, n=1, avoid="worker-1", alone=True)
    assert (first.worker_id, alone.worker_id) == ("worker-0", "worker-0")
    running = asyncio.create_task(ended(pool, alone))
    await asyncio.sleep(0.2)
    assert not alone.submitted
    assert {call_of(pool, n=n).worker_id for n in range(2, 5)} == {"worker-1"}
    await pool.cancel([first.key])
    for cancelled in (neighbour, running):
        with pytest.raises(TrajectoryCancelled):
            await cancelled
    assert alone.submitted
    pool.load["worker-1"] += 1
    assert call_of(pool, n=2).worker_id == "worker-0", "it has work again"


async def test_single_worker_is_shared_by_the_one_that_is_to_be_alone(actors: list[Any]) -> None:
    pool = WorkerPool(actors[:1])
    pool.load["worker-0"] += 1
    alone = asyncio.create_task(ended(pool, call_of(pool, alone=True)))
    assert call_of(pool, n=1).worker_id == "worker-0"
    await alone


async def test_ended_trajectory_leaves_nothing_behind(pool: WorkerPool) -> None:
    await ended(pool, call_of(pool))
    with pytest.raises(TrajectoryFailed):
        await ended(pool, call_of(pool, "raises"))
    assert pool.load.total() == 0
    assert pool.under_way == {}


async def test_dead_worker_fails_its_trajectory_and_is_used_no_more(cluster: None) -> None:
    pool = WorkerPool([ray.remote(actor_class()).remote()])
    doomed = call_of(pool)
    with pytest.raises(TrajectoryFailed, match="worker of trajectory 7-0-0 died"):
        await ended(pool, call_of(pool, "dies"))
    assert pool.alive == 0
    with pytest.raises(TrajectoryFailed, match="worker-0 has died"):
        await ended(pool, doomed)
    with pytest.raises(RolloutFailed):
        call_of(pool)


async def test_calls_wait_for_a_worker_that_ray_starts_again_and_that_is_prepared(
    cluster: None,
) -> None:
    prepared = []

    async def prepare(actor: Any) -> None:
        await actor.cancel.remote([])
        prepared.append(actor)

    actor = ray.remote(max_restarts=1)(actor_class()).remote()
    pool = WorkerPool([actor], prepare)
    with pytest.raises(TrajectoryFailed, match="worker of trajectory 7-0-0 died"):
        await ended(pool, call_of(pool, "dies"))
    assert (pool.alive, pool.lost, prepared) == (0, False, [])
    assert pool.rescore(None, 1, 1) is None
    waiting, cancelled = call_of(pool, n=1), call_of(pool, n=2)
    ends = [asyncio.create_task(ended(pool, waiting)), asyncio.create_task(ended(pool, cancelled))]
    while len(pool.under_way) < 2:
        await asyncio.sleep(0)
    await pool.cancel([cancelled.key])
    assert (await ends[0])[0] == ["sampled"]
    with pytest.raises(TrajectoryCancelled):
        await ends[1]
    assert (pool.alive, pool.lives.total(), prepared) == (1, 1, [actor])
    # Of a call that the dead one had, too late.
    pool.died("worker-0", 0, RuntimeError())
    assert pool.alive == 1
    with pytest.raises(TrajectoryFailed, match="died"):
        await ended(pool, call_of(pool, "dies"))
    with pytest.raises(TrajectoryFailed, match="worker-0 has died"):
        await ended(pool, call_of(pool))
    assert pool.lost
    with pytest.raises(RolloutFailed):
        call_of(pool)
    assert pool.load.total() == 0 and pool.under_way == {}


async def test_worker_whose_death_nobody_noticed_is_prepared_before_it_has_work(actors: list[Any]) -> None:
    async def prepare(actor: Any) -> None:
        await actor.be_prepared.remote()

    pool = WorkerPool(actors[:1], prepare)
    with pytest.raises(TrajectoryFailed, match="started again"):
        await ended(pool, call_of(pool, "works once it is prepared"))
    await ended(pool, call_of(pool, "works once it is prepared"))
    assert (pool.alive, pool.lives.total()) == (1, 1)


async def test_worker_that_is_not_up_again_in_time_is_given_up(cluster: None) -> None:
    class SlowToStart(actor_class()):
        def __init__(self) -> None:
            super().__init__()
            if ray.get_runtime_context().was_current_actor_reconstructed:
                time.sleep(SOON)

    pool = WorkerPool([ray.remote(max_restarts=1)(SlowToStart).remote()], startup_s=0.5)
    with pytest.raises(TrajectoryFailed, match="died"):
        await ended(pool, call_of(pool, "dies"))
    with pytest.raises(TrajectoryFailed, match="worker-0 has died"):
        await ended(pool, call_of(pool))
    assert pool.lost


async def test_lost_object_costs_one_attempt_and_no_worker(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost() -> Any:
        raise ray.exceptions.ObjectLostError("0" * 56, None, "stack")

    class Lossy:
        def __init__(self) -> None:
            self.run_trajectory = self

        def options(self, **options: Any) -> Any:
            return self

        def remote(self, *arguments: Any) -> Any:
            return lost(), lost()

    call = call_of(pool)
    monkeypatch.setitem(pool.actors, call.worker_id, Lossy())
    with pytest.raises(TrajectoryFailed, match="trajectory 7-0-0 failed with ObjectLostError"):
        await ended(pool, call)
    assert pool.alive == 2


async def test_stopped_worker_gets_no_work_then_is_ended_and_started_again(cluster: None) -> None:
    remote = ray.remote(max_restarts=1, max_concurrency=CALLS_AT_ONCE)(actor_class())
    actors = [remote.remote() for _ in range(2)]
    pids = [await actor.__ray_call__.remote(lambda worker: os.getpid()) for actor in actors]
    pool = WorkerPool(actors, answer_s=4.0)
    stuck = call_of(pool, "waits")
    assert stuck.worker_id == "worker-0"
    ending = asyncio.create_task(ended(pool, stuck))
    while not pool.under_way:
        await asyncio.sleep(0.01)
    os.kill(pids[0], signal.SIGSTOP)
    try:
        while not pool.silent:
            await asyncio.sleep(0.05)
        # It has less to do than the other, and answers nothing.
        pool.load["worker-1"] += 5
        assert call_of(pool).worker_id == "worker-1"
        with pytest.raises(TrajectoryFailed, match="worker of trajectory 7-0-0 died"):
            await ending
        while pool.alive < 2:
            await asyncio.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
    assert pool.lives["worker-0"] == 1
    assert not pool.silent
    assert call_of(pool).worker_id == "worker-0"
    await ended(pool, call_of(pool))
    await pool.close([])


async def test_worker_that_blocks_its_event_loop_for_less_than_its_deadline_is_kept(cluster: None) -> None:
    actor = ray.remote(max_restarts=1)(actor_class()).remote()
    pool = WorkerPool([actor], answer_s=6.0)
    call_of(pool)
    await actor.__ray_call__.remote(lambda worker: time.sleep(4.0))
    await ended(pool, call_of(pool))
    assert (pool.alive, pool.lives.total(), pool.silent) == (1, 0, set())
    await pool.close([])


async def test_trajectory_by_itself_begins_in_a_sound_worker(cluster: None) -> None:
    actor = ray.remote(max_restarts=-1, max_concurrency=CALLS_AT_ONCE)(actor_class()).remote()
    await actor.__ray_call__.remote(lambda worker: setattr(worker, "is_broken", True))
    pool = WorkerPool([actor])
    await ended(pool, call_of(pool, alone=True))
    assert pool.lives.total() == 1
    await pool.close([])


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("is spoilt", r"died: .*no such tool, and torch\.zeros is None"),
        ("breaks all calls", "died: it answers every call with TypeError"),
    ],
)
async def test_spoilt_worker_is_ended_and_started_again(behaviour: str, said: str, cluster: None) -> None:
    pool = WorkerPool([ray.remote(max_restarts=-1, max_concurrency=CALLS_AT_ONCE)(actor_class()).remote()])
    with pytest.raises(TrajectoryDisturbed, match=said):
        await ended(pool, call_of(pool, behaviour))
    await ended(pool, call_of(pool, n=1))
    assert pool.lives.total() == 1
    await pool.close([])


async def test_worker_that_was_started_again_and_stands_still_before_any_other_call_is_ended(cluster: None) -> None:
    pool = WorkerPool([ray.remote(max_restarts=-1)(actor_class()).remote()], answer_s=2.0)
    calls = [call_of(pool, behaviour, n) for n, behaviour in enumerate(["dies", "stops", "stops"])]
    for call in calls:
        with pytest.raises(TrajectoryFailed, match="died"):
            await asyncio.wait_for(ended(pool, call), SOON / 2)
    assert pool.lives.total() >= 2
    await pool.close([])

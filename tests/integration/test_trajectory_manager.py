# SPDX-License-Identifier: Apache-2.0
"""Validation over agent-loop workers that die, and what one is told that was started again.

The workers of validation are objects of this process that say what Ray says; that Ray does say so is shown over real
actors in test_worker_pool.py, and with everything else in tests/e2e/test_replacement.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest
import ray
import torch
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError
from remote_fakes import Handle
from verl import DataProto

from recipe.async_engine.core.columns import REPORTED
from recipe.async_engine.recovery import restarts
from recipe.async_engine.recovery.restarts import is_up_again
from recipe.async_engine.rollout.trajectory_manager import TrajectoryManager, ValidationTimeout
from recipe.async_engine.rollout.worker_pool import NoWorkers

SOON = 60.0
DIED, RESTARTING = ActorDiedError(), ActorUnavailableError("", None)


class Worker:
    """Answers each prompt with its number.

    Args:
        deaths: what its first parts of validation end with.
        states: what Ray says when it is asked whether it is up, None: it is.
    """

    def __init__(self, number: int, deaths: tuple[Exception, ...] = (), states: tuple[Exception | None, ...] = ()):
        self.number, self.deaths, self.states = number, list(deaths), list(states)
        self.seconds = 0.0

    def __ray_ready__(self) -> None:
        if (state := self.states.pop(0)) is not None:
            raise state

    async def generate_sequences(self, part: DataProto) -> DataProto:
        await asyncio.sleep(self.seconds)
        if self.deaths:
            raise self.deaths.pop(0)
        spent = {"generate_sequences": 0.1, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": 0}
        answers = torch.full((len(part), 1), self.number)
        tensors = {"prompts": part.batch["prompts"], "answers": answers}
        reports = {REPORTED: np.array([{}] * len(part))}
        return DataProto.from_dict(tensors, reports, meta_info={"metrics": [spent] * len(part)})


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "ASK_AGAIN_S", 0.01)


def manager_of(*workers: Any) -> TrajectoryManager:
    config = {"actor_rollout_ref": {"rollout": {}, "model": {}}, "async_training": {"max_replica_restarts": 1}}
    manager = TrajectoryManager(OmegaConf.create(config), llm_client=None)
    manager.agent_loop_workers = list(workers)
    return manager


def validated_by(*workers: Worker) -> TrajectoryManager:
    return manager_of(*[Handle(worker) for worker in workers])


def prompts(*numbers: int) -> DataProto:
    return DataProto.from_dict(tensors={"prompts": torch.tensor([[number] for number in numbers])})


async def answers(manager: TrajectoryManager) -> list[int]:
    """Who answered, of four prompts."""
    done = await manager.generate_sequences(prompts(1, 2, 3, 4))
    assert done.batch["prompts"].flatten().tolist() == [1, 2, 3, 4]
    assert "agent_loop/slowest/generate_sequences" in done.meta_info["timing"]
    return done.batch["answers"].flatten().tolist()


async def test_each_worker_has_its_part_of_a_validation() -> None:
    assert await answers(validated_by(Worker(0), Worker(1))) == [0, 0, 1, 1]


async def test_part_of_a_worker_that_dies_is_done_by_another() -> None:
    manager = validated_by(Worker(0, (DIED,)), Worker(1))
    assert await answers(manager) == [1, 1, 1, 1]
    # It has work again once it was started again.
    assert await answers(manager) == [0, 0, 1, 1]


async def test_validation_waits_for_a_worker_that_is_being_started_when_there_is_no_other() -> None:
    gone = Worker(0, (DIED,) * 9, (DIED,) * 9)
    started = Worker(1, (RESTARTING, RESTARTING), (RESTARTING, None) * 9)
    assert await answers(validated_by(gone, started)) == [1, 1, 1, 1]


async def test_validation_without_any_worker_says_so() -> None:
    with pytest.raises(NoWorkers):
        await answers(validated_by(*[Worker(number, (DIED,) * 9, (DIED,) * 9) for number in range(2)]))


async def test_error_of_an_agent_loop_in_validation_is_not_the_death_of_its_worker() -> None:
    met_a_dead_actor = RayTaskError("generate_sequences", "", DIED).as_instanceof_cause()
    assert isinstance(met_a_dead_actor, RayActorError)
    with pytest.raises(RayTaskError):
        await answers(validated_by(Worker(0, (met_a_dead_actor,)), Worker(1)))


async def test_validation_has_a_deadline_that_names_its_setting() -> None:
    slow = Worker(0)
    manager = validated_by(slow, Worker(1))
    slow.seconds = SOON
    with pytest.raises(ValidationTimeout, match=r"async_training\.timeouts\.validation"), manager.validation(0.05):
        await answers(manager)
    slow.seconds = 0.1
    assert await answers(manager) == [0, 0, 1, 1]


async def test_timeout_of_something_else_is_not_taken_for_the_deadline() -> None:
    manager = validated_by(Worker(0, (TimeoutError("of a tool"),)), Worker(1))
    with pytest.raises(TimeoutError, match="of a tool"), manager.validation(SOON):
        await answers(manager)


async def test_worker_that_was_started_again_hears_what_all_were_told_last(cluster: None) -> None:
    class Listener:  # made here, so that Ray sends it by value: its processes cannot import test modules
        def __init__(self) -> None:
            self.heard: list[str] = []

        async def hear(self, word: str) -> None:
            self.heard.append(word)

        async def be_prepared(self) -> None:
            self.heard.append("that it may work")

        async def process(self) -> int:
            return os.getpid()

        async def what_was_heard(self) -> list[str]:
            return self.heard

    first, second = (ray.remote(max_restarts=1)(Listener).remote() for _ in range(2))
    manager = manager_of(first, second)
    manager.tell("hear", "an old word", timeout_s=SOON)
    manager.tell("hear", "the word", timeout_s=SOON)
    os.kill(await first.process.remote(), signal.SIGKILL)
    assert await asyncio.wait_for(is_up_again(first), SOON)
    assert await first.what_was_heard.remote() == []
    await manager.prepare(first)
    assert await first.what_was_heard.remote() == ["the word", "that it may work"]
    assert await second.what_was_heard.remote() == ["an old word", "the word"]
    # A dead one keeps nobody from being told.
    ray.kill(second)
    manager.tell("hear", "a new word", timeout_s=SOON)
    assert await first.what_was_heard.remote() == ["the word", "that it may work", "a new word"]

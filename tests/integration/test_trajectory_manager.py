# SPDX-License-Identifier: Apache-2.0
"""What an agent-loop worker is told that was started again."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError

from recipe.async_engine.actors import control
from recipe.async_engine.actors.control import is_up_again
from recipe.async_engine.rollout.trajectory_manager import TrajectoryManager

SOON = 60.0
DIED, RESTARTING = ActorDiedError(), ActorUnavailableError("", None)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ASK_AGAIN_S", 0.01)


def manager_of(*workers: Any) -> TrajectoryManager:
    config = {"actor_rollout_ref": {"rollout": {}, "model": {}}, "async_training": {"max_replica_restarts": 1}}
    manager = TrajectoryManager(OmegaConf.create(config), llm_client=None)
    manager.agent_loop_workers = list(workers)
    return manager


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

# SPDX-License-Identifier: Apache-2.0
"""Calls of teachers: which server gets them, and what a server costs that dies or hangs. Servers are actors of Ray."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from surroundings import has_ended

from recipe.async_engine.actors.replacement import Restarts
from recipe.async_engine.actors.worker_set import WorkerDied
from recipe.async_engine.core.errors import CannotGoOn
from recipe.async_engine.rollout import teachers as module
from recipe.async_engine.rollout.teachers import TeacherClient, Teachers

CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
IN_TIME_S = 60.0


def servers(count: int) -> list[Any]:
    class Server:  # made here, so that Ray sends it by value: its processes cannot import test modules
        async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
            from verl.workers.rollout.replica import TokenOutput

            from recipe.async_engine.core.errors import EngineDied

            if not prompt_ids:
                os._exit(1)
            if prompt_ids == [13]:
                raise EngineDied("no engine")
            found = {"prompt_ids": prompt_ids, "prompt_logprobs": sampling_params["prompt_logprobs"]}
            return TokenOutput(token_ids=[0], extra_fields=found | {"pid": os.getpid()})

        has_engine = True

        async def lose_engine(self) -> None:
            self.has_engine = False

        async def check_engine(self) -> None:
            from recipe.async_engine.core.errors import EngineDied

            if not self.has_engine:
                raise EngineDied("no engine")

    return [ray.remote(Server).remote() for _ in range(count)]


async def pid_of_answer(client: TeacherClient, prompt: list[int], limit_s: float = IN_TIME_S) -> int:
    asked = client.generate("a request", prompt_ids=prompt, sampling_params={"prompt_logprobs": 4})
    output = await asyncio.wait_for(asked, limit_s)
    assert (output.extra_fields["prompt_ids"], output.extra_fields["prompt_logprobs"]) == (prompt, 4)
    return int(output.extra_fields["pid"])


async def test_calls_are_divided_among_servers_and_a_dead_one_gets_no_more(cluster: None) -> None:
    client = TeacherClient(CONFIG, "default")
    client.use(servers(2))
    assert len({await pid_of_answer(client, [1, 2]) for _ in range(4)}) == 2
    with pytest.raises(WorkerDied):
        await pid_of_answer(client, [])
    assert len({await pid_of_answer(client, [3]) for _ in range(4)}) == 1
    with pytest.raises(WorkerDied):
        await pid_of_answer(client, [])

    async def is_answered() -> int:
        while True:
            with suppress(WorkerDied):
                return await pid_of_answer(client, [4])

    waiting = asyncio.create_task(is_answered())
    await asyncio.sleep(1.0)
    assert not waiting.done()
    client.use(servers(1))
    assert await waiting


async def test_server_whose_engine_has_died_is_ended_and_gets_no_more_calls(cluster: None) -> None:
    client = TeacherClient(CONFIG, "default")
    client.use(servers(2))
    pids = {await pid_of_answer(client, [1]) for _ in range(4)}
    with pytest.raises(WorkerDied, match=r"teacher default worker-. died: .*no engine"):
        await pid_of_answer(client, [13])
    (left,) = {await pid_of_answer(client, [1]) for _ in range(4)}
    (ended,) = pids - {left}
    async with asyncio.timeout(IN_TIME_S):
        while not has_ended(ended):
            await asyncio.sleep(0.1)


async def test_stopped_server_is_set_aside_and_killed(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEACHER_S", 2.0)
    client = TeacherClient(CONFIG, "default")
    client.use(servers(2))
    pids = {await pid_of_answer(client, [1]) for _ in range(4)}
    stopped = min(pids)
    os.kill(stopped, signal.SIGSTOP)
    given_up = 0
    for _ in range(6):
        try:
            assert await pid_of_answer(client, [2], limit_s=3.0) != stopped
        except TimeoutError:
            given_up += 1
    # One call found it out, all others went elsewhere.
    assert given_up <= 1
    async with asyncio.timeout(IN_TIME_S):
        while not has_ended(stopped):
            await asyncio.sleep(0.1)


async def test_client_reaches_workers_before_its_servers_do(cluster: None) -> None:
    @ray.remote
    class Worker:
        def __init__(self, client: TeacherClient) -> None:
            self.client = client

        async def use(self, servers: list[Any]) -> None:
            self.client.use(servers)

        async def ask(self) -> list[int]:
            asked = self.client.generate("a request", prompt_ids=[5], sampling_params={"prompt_logprobs": 0})
            return (await asked).extra_fields["prompt_ids"]

    worker = Worker.remote(TeacherClient(CONFIG, "default"))
    await worker.use.remote(servers(1))
    assert await asyncio.wait_for(worker.ask.remote(), IN_TIME_S) == [5]


def replica(number: int, server: Any) -> Any:
    return SimpleNamespace(replica_rank=number, servers=[server], workers=[], server_handle=server)


class Replacing(Teachers):
    """Teachers whose replacements are servers of this test; tests/e2e/test_distillation.py has real ones."""

    def _start_another(self, lost: Any) -> Any:
        return replica(next(self._numbers), servers(1)[0])


@pytest.fixture
def told(cluster: None) -> Iterator[tuple[Teachers, queue.Queue[Any], Callable[[int], None]]]:
    """Two servers of one teacher and one of another, what is told of them, and a function to watch over them."""
    first, second, other = servers(3)
    teachers = Replacing({"math": [replica(0, first), replica(1, second)], "code": [replica(2, other)]})
    told: queue.Queue[Any] = queue.Queue()
    yield teachers, told, lambda most: teachers.watch(Restarts(most), IN_TIME_S, told.put, told.put)
    teachers.stop()


def pid_of(server: Any) -> int:
    return ray.get(server.__ray_call__.remote(lambda _: os.getpid()))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_server_is_left_out_and_another_takes_its_place(
    how: signal.Signals, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers, said, watch = told
    before = teachers.server_handles
    *_, lost = (pid_of(server) for servers in before.values() for server in servers)
    monkeypatch.setattr(module, "TEACHER_S", 2.0)
    watch(1)
    os.kill(lost, how)
    assert said.get(timeout=IN_TIME_S) == {"math": before["math"], "code": []}
    after = said.get(timeout=IN_TIME_S)
    assert after["math"] == before["math"] and len(after["code"]) == 1
    assert pid_of(after["code"][0]) != lost
    deadline = time.monotonic() + IN_TIME_S
    while not has_ended(lost):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [replica.replica_rank for replica in teachers.replicas["code"]] == [3]


def test_server_without_its_engine_is_lost_and_a_teacher_without_a_server_ends_the_run(told: Any) -> None:
    teachers, said, watch = told
    first, second = teachers.server_handles["math"]
    watch(0)
    ray.get(first.lose_engine.remote())
    assert said.get(timeout=IN_TIME_S)["math"] == [second]
    os.kill(pid_of(second), signal.SIGKILL)
    assert said.get(timeout=IN_TIME_S)["math"] == []
    error = said.get(timeout=IN_TIME_S)
    assert isinstance(error, CannotGoOn)
    assert "teacher math has no server left" in str(error) and "async_training.max_replica_restarts=0" in str(error)

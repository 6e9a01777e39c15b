# SPDX-License-Identifier: Apache-2.0
"""What users' code changes in a worker's process: known after the next failure, and the worker started again."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import numpy as np
import pytest
import torch
from remote_fakes import ScriptedServer, part
from test_trajectory_worker import SOON, Reward, make_worker, run  # noqa: F401
from verl.utils.dataset.rl_dataset import RLHFDataset

from recipe.async_engine.actors.worker_set import WorkerSpoilt
from recipe.async_engine.rollout.group_run import AgentLoopError
from recipe.async_engine.rollout.users_loop import contain_exits

ATTRIBUTES = {
    "torch": (torch, "tensor"),
    "asyncio": (asyncio, "wait"),
    "sockets": (socket, "socketpair"),
    "numpy": (np, "array"),
}


@pytest.fixture
def worker(make_worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    made = make_worker(ScriptedServer(*[part([10, 11], 7)] * 100), Reward(*[0.5] * 100))
    made.dataset_cls = RLHFDataset
    return made


async def test_worker_that_is_as_it_was_goes_on(worker: Any) -> None:
    for _ in range(3):
        with pytest.raises(AgentLoopError, match="calculator"):
            await run(worker, "RaisingLoop")
    assert (await run(worker))[0].score == 0.5


@pytest.mark.parametrize("what", [*ATTRIBUTES, "tokenizer", "client", "type", "stack"])
async def test_worker_that_was_changed_says_so_when_a_trajectory_fails(
    what: str, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await run(worker))[0].score == 0.5
    dtype, depth = torch.get_default_dtype(), sys.getrecursionlimit()
    try:
        with monkeypatch.context() as patched:
            if what in ATTRIBUTES:
                patched.setattr(*ATTRIBUTES[what], None)
            elif what == "tokenizer":
                patched.setattr(worker.tokenizer, "chat_template", "{{ raise_exception('poisoned') }}")
            elif what == "client":
                patched.setattr(worker.llm_client, "generate", None)
            elif what == "type":
                torch.set_default_dtype(torch.float16)
            else:
                sys.setrecursionlimit(300)
            with pytest.raises(WorkerSpoilt, match=r"(calculator|not callable).*no trajectory can run in this worker"):
                await worker.run_trajectory("1-0-0", {"raw_prompt": [], "agent_name": "RaisingLoop"}, 4, 0, 7)
    finally:
        torch.set_default_dtype(dtype)
        sys.setrecursionlimit(depth)


async def test_call_that_is_cancelled_before_it_begins_begins_all_the_same() -> None:
    ended = []

    async def call() -> None:
        try:
            await asyncio.sleep(SOON)
        finally:
            ended.append(True)

    loop = asyncio.get_running_loop()
    contain_exits(loop)
    try:
        task = asyncio.create_task(call())
        for each in asyncio.all_tasks() - {asyncio.current_task()}:
            each.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        loop.set_task_factory(None)
    assert ended == [True]

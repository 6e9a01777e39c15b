# SPDX-License-Identifier: Apache-2.0
"""Reward functions in processes: what each call gives, costs and leaves behind; verl's own worker around it."""

from __future__ import annotations

import asyncio
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from surroundings import has_ended
from tensordict import TensorDict
from verl import DataProto

from recipe.async_engine.rewards import pool as scorer
from recipe.async_engine.rewards import scoring_worker
from recipe.async_engine.rewards.pool import RewardFailed, RewardProcessDied, ScoringPool
from recipe.async_engine.rewards.scoring_worker import ScoringWorker
from recipe.laptop.task.tokenizer import build_tokenizer

FUNCTION = """
import os, subprocess, sys, time
LOADED = time.time()
LEAK = []

def compute_score(solution_str, mark=None, weight=1.0, **rest):
    if solution_str == "loops":
        while True: pass
    if solution_str == "forks":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open(mark, "w").write(str(child.pid))
        time.sleep(1000)
    if solution_str == "fills memory":
        block = []
        while True: block.append(bytes(64 << 20))
    if solution_str == "leaks":
        LEAK.append(bytearray(64 << 20))
    if solution_str == "dies":
        os._exit(3)
    if solution_str == "prints":
        sys.stdout.write("x" * (1 << 20)); sys.stderr.write("x" * (1 << 20))
    if solution_str == "raises":
        raise KeyError("no such case")
    if solution_str == "times out":
        raise TimeoutError("the judge did not answer")
    if solution_str == "works":
        end = time.process_time() + 0.5
        while time.process_time() < end: pass
    return {"score": weight, "pid": os.getpid(), "loaded": LOADED}
"""
LIMIT_S = 2.0


@pytest.fixture
def function(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(FUNCTION)
    return path


@pytest.fixture
def main_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reward worker has to itself: a `__main__` without a file, and a server that scoring processes fork."""
    monkeypatch.setitem(vars(sys.modules["__main__"]), "__file__", "main.py")
    monkeypatch.setenv(scorer.PRELOAD, "")
    # In a local run it would start a fork of the whole stack.
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", "/no/such/interpreter")
    multiprocessing.forkserver._forkserver._stop()


@pytest.fixture
async def pool(function: Path, main_file: None) -> AsyncIterator[ScoringPool]:
    pool = ScoringPool(str(function), "compute_score", {"weight": 0.5}, 1, LIMIT_S, memory_bytes=512 << 20)
    await pool.start()
    yield pool
    pool.close()


async def test_process_of_a_start_that_failed_answers_no_call(
    pool: ScoringPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that they are forked from can end between the fork and its word that it was made."""
    start, failed = type(pool._context.Process()).start, []

    def fails_once(process: Any) -> None:
        start(process)
        if not failed:
            failed.append(process)
            raise EOFError

    monkeypatch.setattr(pool._context.Process, "start", fails_once)
    with pytest.raises(RewardProcessDied):
        await pool.score(solution_str="dies")
    scored = [await pool.score(solution_str="") for _ in range(3)]
    assert [each["score"] for each in scored] == [0.5] * 3
    await asyncio.to_thread(failed[0].join, LIMIT_S)
    assert failed[0].exitcode is not None


async def test_score_is_the_functions_with_its_settings_from_another_process(pool: ScoringPool) -> None:
    result = await pool.score(solution_str="", data_source="x")
    assert result["score"] == 0.5
    assert result["pid"] != os.getpid()
    assert (await pool.score(solution_str=""))["pid"] == result["pid"]


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("loops", RewardFailed, r"gave nothing within 2 s \(async_training\.timeouts\.reward\)"),
        ("dies", RewardProcessDied, "ended, exit status 3"),
        ("fills memory", RewardProcessDied, "ended, out of memory .*reward_memory_gib"),
        ("raises", RewardFailed, "^KeyError: 'no such case'"),
        ("times out", RewardFailed, "^TimeoutError: the judge did not answer"),
    ],
)
async def test_failing_call_costs_itself_alone(
    pool: ScoringPool, what: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        await pool.score(solution_str=what)
    assert type(raised.value) is error
    assert (await pool.score(solution_str=""))["score"] == 0.5


async def test_process_whose_calls_fail_in_a_row_is_replaced(pool: ScoringPool) -> None:
    """Something that a call has done there may be why; a function that raises now and then keeps what it has loaded."""
    pids = []
    for what in ("raises", "", "raises", "raises", ""):
        try:
            pids.append((await pool.score(solution_str=what))["pid"])
        except RewardFailed:
            continue
    assert pids[0] != pids[1]
    pids = []
    for what in ("raises", "", "raises", ""):
        try:
            pids.append((await pool.score(solution_str=what))["pid"])
        except RewardFailed:
            continue
    assert pids[0] == pids[1]


async def test_leak_ends_its_process_at_the_limit_and_costs_the_call_that_meets_it(pool: ScoringPool) -> None:
    """512 MiB of address space and 64 more with each call: some six calls a process."""
    pids, died = set(), 0
    for _ in range(30):
        try:
            pids.add((await pool.score(solution_str="leaks"))["pid"])
        except RewardProcessDied:
            died += 1
    assert len(pids) >= 3
    assert len(pids) - 1 <= died <= len(pids)
    assert pool.stats["died"] == died


async def test_process_that_is_ended_is_replaced_without_loading_the_function_again(pool: ScoringPool) -> None:
    before = await pool.score(solution_str="")
    with pytest.raises(RewardFailed):
        await pool.score(solution_str="loops")
    after = await pool.score(solution_str="")
    assert before["pid"] != after["pid"]
    assert before["loaded"] == after["loaded"]
    deadline = time.monotonic() + 20
    while not has_ended(before["pid"]):
        assert time.monotonic() < deadline, "it was not ended"
        await asyncio.sleep(0.05)


async def test_what_a_call_has_started_ends_with_it(pool: ScoringPool, tmp_path: Path) -> None:
    mark = tmp_path / "child"
    with pytest.raises(RewardFailed):
        await pool.score(solution_str="forks", mark=str(mark))
    child = int(mark.read_text())
    deadline = time.monotonic() + 20
    # A process is ended within a moment of its deadline; its child with the next failure at the latest.
    while not has_ended(child):
        assert time.monotonic() < deadline
        with pytest.raises(RewardFailed):
            await pool.score(solution_str="loops")


async def test_call_that_was_given_up_in_the_queue_does_not_run(pool: ScoringPool) -> None:
    calls = [asyncio.create_task(pool.score(solution_str="loops")) for _ in range(4)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, RewardFailed) for result in results)
    assert pool.stats["pending"] == 0


async def test_prints_go_nowhere_and_counts_are_kept(pool: ScoringPool, capfd: pytest.CaptureFixture[str]) -> None:
    scored = pool.stats["scored"]
    await pool.score(solution_str="prints")
    with pytest.raises(RewardFailed):
        await pool.score(solution_str="raises")
    assert (pool.stats["scored"] - scored, pool.stats["failed"], pool.stats["pending"]) == (1, 1, 0)
    assert pool.stats["seconds"] > 0
    assert "xxx" not in "".join(capfd.readouterr())


async def test_calls_run_beside_each_other_and_the_loop_goes_on(function: Path, main_file: None) -> None:
    pool = ScoringPool(str(function), "compute_score", {}, 2, timeout_s=60.0)
    try:
        await pool.start()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        results = await asyncio.gather(*(pool.score(solution_str="works") for _ in range(4)))
        ticking.cancel()
        assert len({result["pid"] for result in results}) == 2
        assert ticks >= 10
    finally:
        pool.close()


async def test_function_that_cannot_be_loaded_fails_with_its_own_error(tmp_path: Path, main_file: None) -> None:
    path = tmp_path / "reward.py"
    path.write_text("import no_such_module\n")
    pool = ScoringPool(str(path), "compute_score", {}, 1, timeout_s=30.0)
    try:
        with pytest.raises(RewardFailed, match="No module named 'no_such_module'") as raised:
            await pool.start()
        assert f'File "{path}", line 1' in raised.value.__notes__[0]
    finally:
        pool.close()


ORPHAN = """
import asyncio, os, sys, threading, time
sys.path.insert(0, {root!r})
from recipe.async_engine.rewards.pool import ScoringPool
if __name__ == "__main__":
    pool = ScoringPool({path!r}, "compute_score", {{}}, 1, timeout_s=1000.0)
    print(asyncio.run(pool.score(solution_str=""))["pid"], flush=True)
    asyncio.run(pool.score(solution_str="loops"))
"""


def test_endless_call_does_not_outlive_its_reward_worker(function: Path) -> None:
    script = ORPHAN.format(root=str(Path(__file__).parents[2]), path=str(function))
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    scorer = int(worker.stdout.readline())
    time.sleep(0.5)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    deadline = time.monotonic() + 20
    while not has_ended(scorer):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def reward_config(path: str | None, processes: int) -> Any:
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"model": {"tokenizer_path": "none", "path": "none"}},
            "async_training": {"reward_processes": processes, "reward_memory_gib": None, "timeouts": {"reward": 60.0}},
            "reward": {
                "reward_model": {"enable": False},
                "custom_reward_function": {"path": path, "name": "compute_score", "reward_kwargs": {"weight": 0.25}},
                "reward_manager": {"source": "register", "name": "naive"},
            },
        }
    )


def answer(tokenizer: Any, text: str) -> DataProto:
    ids = torch.tensor([tokenizer.encode(text)])
    batch = TensorDict({"responses": ids, "attention_mask": torch.ones_like(ids)}, batch_size=1)
    fields = {"data_source": ["d"], "reward_model": [{"ground_truth": "g"}], "extra_info": [{}]}
    data = DataProto.from_dict({key: batch[key] for key in batch.keys()}, non_tensors={})  # noqa: SIM118
    for key, value in fields.items():
        data.non_tensor_batch[key] = np.array(value, dtype=object)
    return data


@pytest.mark.parametrize("processes", [0, 1])
async def test_verls_reward_manager_scores_through_the_pool(
    function: Path, main_file: None, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    tokenizer = build_tokenizer()
    stock = "verl.experimental.reward_loop.reward_loop"
    monkeypatch.setattr(f"{stock}.copy_to_local", lambda path: path)
    monkeypatch.setattr(f"{stock}.hf_tokenizer", lambda path, **_: tokenizer)
    worker = ScoringWorker(reward_config(str(function), processes))
    result = await worker.compute_score(answer(tokenizer, "42"))
    assert result["reward_score"] == 0.25
    assert (result["reward_extra_info"]["pid"] != os.getpid()) == bool(processes)
    assert (await worker.pool_stats())[1]["scored"] == processes
    if worker.pool is not None:
        worker.pool.close()


def test_upstream_still_offers_what_the_workers_override() -> None:
    assert scoring_worker.RewardLoopManager._init_reward_loop_workers
    assert scoring_worker.RewardLoopWorker._init_reward_fn

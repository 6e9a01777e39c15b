# SPDX-License-Identifier: Apache-2.0
"""Whatever a reward function does costs its own call, with its words, in the real pool and the real reward worker.

With every reward manager of verl that calls a function, and one of the user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing.forkserver
import pickle
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import odd_rewards
import pytest
import pytest_asyncio
from odd_rewards import DIED, HARMLESS, LATE, RAISED, SCORED, WAYS, Way
from omegaconf import OmegaConf
from test_reward_pool import answer, reward_config

from recipe.async_engine.rewards import pool as scorer
from recipe.async_engine.rewards.pool import RewardFailed, RewardProcessDied, ScoringPool
from recipe.async_engine.rewards.scoring_worker import ScoringWorker
from recipe.async_engine.rollout.loop_output import NonFiniteReward, check_reward
from recipe.laptop.task.tokenizer import build_tokenizer

ERRORS = {RAISED: RewardFailed, DIED: RewardProcessDied, LATE: RewardFailed}
LIMIT_S, AMPLE_S = 1.0, 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[ScoringPool]:
    """One for all ways: what one of them has done, the next one meets."""
    with pytest.MonkeyPatch.context() as patch:
        # As in a reward worker, see test_reward_pool.
        patch.setitem(vars(sys.modules["__main__"]), "__file__", "main.py")
        patch.setenv(scorer.PRELOAD, "")
        multiprocessing.forkserver._forkserver._stop()
        pool = ScoringPool(odd_rewards.__file__, "compute_score", {}, 1, AMPLE_S, memory_bytes=1 << 30)
        await pool.start()
        yield pool
        pool.close()


async def outcome(pool: ScoringPool, name: str) -> Any:
    """The score, or the error."""
    try:
        result = await pool.score(solution_str=name)
    except Exception as error:
        return error
    return result["score"] if isinstance(result, dict) else result


def check(name: str, asked: Way, found: Any) -> None:
    if asked.ends == SCORED:
        assert found == asked.says or (found != found and math.isnan(asked.says)), (name, found)
        return
    assert type(found) is ERRORS[asked.ends], (name, found)
    assert re.search(asked.says, str(found), re.DOTALL), (name, found)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", WAYS)
async def test_reward_costs_its_own_call_and_the_next_one_scores(pool: ScoringPool, name: str) -> None:
    # Only for those that never return; a busy machine may take long over a fork.
    pool._timeout_s = LIMIT_S if WAYS[name].ends == LATE else AMPLE_S
    check(name, WAYS[name], await outcome(pool, name))
    pool._timeout_s = AMPLE_S
    if WAYS[name].alone:
        # What it has done to its process is there still.
        await outcome(pool, "leaves at once")
    assert await outcome(pool, "") == 1.0


MANAGER = """
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

class Own(NaiveRewardManager):
    async def run_single(self, data):
        return await super().run_single(data)
"""
TOKENIZER = build_tokenizer()


@contextlib.asynccontextmanager
async def scoring_worker(monkeypatch: pytest.MonkeyPatch, manager: dict[str, Any], **changes: Any) -> Any:
    """A reward worker of the odd function, outside Ray."""
    monkeypatch.setitem(vars(sys.modules["__main__"]), "__file__", "main.py")
    monkeypatch.setenv(scorer.PRELOAD, "")
    stock = "verl.experimental.reward_loop.reward_loop"
    monkeypatch.setattr(f"{stock}.copy_to_local", lambda path: path)
    monkeypatch.setattr(f"{stock}.hf_tokenizer", lambda path, **_: TOKENIZER)
    config = reward_config(odd_rewards.__file__, changes.pop("processes", 1))
    reward = {"reward_manager": manager, "custom_reward_function": {"name": "compute_score", "reward_kwargs": {}}}
    config.merge_with({"trainer": {"experiment_name": "x"}, "reward": {**reward, "num_workers": 1}})
    worker = ScoringWorker(OmegaConf.merge(config, OmegaConf.create(changes)))
    try:
        await worker.be_ready()
        yield worker
    finally:
        if worker.pool is not None:
            worker.pool.close()


async def scored_by(worker: ScoringWorker, name: str) -> Any:
    """The score that verl would be given, or the error that Ray would carry."""
    data = answer(TOKENIZER, "42")
    data.non_tensor_batch["extra_info"][0] = {"way": name}
    try:
        result = await asyncio.wait_for(worker.compute_score(data), 30)
    except Exception as error:
        return pickle.loads(pickle.dumps(error))
    return pickle.loads(pickle.dumps(result))["reward_score"]


THREADS_LACK = ("stop", "exit", "systemexit", "interrupt", "keyboard", "generator")
LATER = {"reward": {"custom_reward_function": {"name": "compute_score_later"}}}
IN_THREADS = {"processes": 0}


@pytest.mark.parametrize("name", ["naive", "dapo", "gdpo", "rate_limited", "remote", "own"])
@pytest.mark.parametrize("changes", [LATER, IN_THREADS, {}], ids=["asynchronous", "in threads", "in processes"])
async def test_every_reward_manager_fails_a_call_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, name: str, changes: dict[str, Any]
) -> None:
    if name == "remote" and changes:
        pytest.skip("it takes no asynchronous function, and without processes it is verl's, with actors")
    manager = {"source": "register", "name": name}
    if name == "own":
        (tmp_path / "manager.py").write_text(MANAGER)
        manager = {"source": "importlib", "name": "Own", "module": {"path": str(tmp_path / "manager.py")}}
    # In processes the pool's own test has them all.
    ways = HARMLESS if changes else HARMLESS[::12]
    async with scoring_worker(monkeypatch, manager, **changes) as worker:
        for asked in ways:
            if name == "own" and changes == IN_THREADS and asked.lower().startswith(THREADS_LACK):
                continue  # verl's own way, in the user's own manager: such an error has a thread's future hang
            found = await scored_by(worker, asked)
            expected = WAYS[asked]
            if expected.ends == DIED and changes:
                expected = expected._replace(ends=RAISED, says="MemoryError")
            if name == "own" and changes:
                assert isinstance(found, RewardFailed) or expected.ends == SCORED or type(found).__name__ == "NotPlain"
                continue
            if expected.ends == RAISED:
                assert re.search(expected.says, str(found), re.DOTALL), (asked, found)
            else:
                check(asked, expected, found)
        assert await scored_by(worker, "") == 1.0


async def test_rate_limited_call_that_takes_too_long_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = {"source": "register", "name": "rate_limited"}
    async with scoring_worker(monkeypatch, manager, reward={"timeout": 1.0}) as worker:
        found = await scored_by(worker, "hangs")
    assert type(found) is RewardFailed
    assert "within 1 s (reward.timeout)" in str(found)


@pytest.mark.parametrize("score", ["0.5", b"1", None, [1.0], {"a": 1}, math.nan, 10**400])
def test_score_that_is_no_number_is_none_for_a_batch(score: Any) -> None:
    with pytest.raises(NonFiniteReward, match="gave reward="):
        check_reward(score, {}, ())

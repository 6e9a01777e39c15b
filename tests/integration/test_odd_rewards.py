# SPDX-License-Identifier: Apache-2.0
"""Whatever a reward function does costs its own call, with its words, in the real pool and the real reward worker."""

from __future__ import annotations

import asyncio
import math
import multiprocessing.forkserver
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import odd_rewards
import pytest
import pytest_asyncio
from odd_rewards import DIED, LATE, RAISED, SCORED, WAYS, Way

from recipe.async_engine.rewards import scorer
from recipe.async_engine.rewards.pool import RewardProcessDied, RewardRaised, RewardTimeout, ScoringPool

ERRORS = {RAISED: RewardRaised, DIED: RewardProcessDied, LATE: RewardTimeout}
LIMIT_S = 3.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[ScoringPool]:
    """One for all ways: what one of them has done, the next one meets."""
    with pytest.MonkeyPatch.context() as patch:
        # As in a reward worker, see test_reward_pool.
        patch.setitem(vars(sys.modules["__main__"]), "__file__", "main.py")
        patch.setenv(scorer.PRELOAD, "")
        multiprocessing.forkserver._forkserver._stop()
        pool = ScoringPool(odd_rewards.__file__, "compute_score", {}, 1, LIMIT_S, memory_bytes=1 << 30)
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
    check(name, WAYS[name], await outcome(pool, name))
    if WAYS[name].alone:
        # What it has done to its process is there still.
        await asyncio.sleep(0.2)
        await outcome(pool, "leaves at once")
    assert await outcome(pool, "") == 1.0

# SPDX-License-Identifier: Apache-2.0
"""Log-prob servers as Ray actors, from a weight transfer to answers; server_scenario.py plays it once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from surroundings import shared_forks, usual_environment

from recipe.async_engine.log_prob_servers.server import Ranks, deal
from recipe.async_engine.log_prob_servers.service import EngineLost

FP32 = 1e-5
SCENARIO_S = 400
SERVERS = {"model_engine_0", "model_engine_1"}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    forks = shared_forks(usual_environment())
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("server_scenario.py")), str(forks)],
        capture_output=True,
        text=True,
        timeout=SCENARIO_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-8000:]
    # Ray may write to the same stream, before and after.
    return next(json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"before_any"'))


def test_nothing_is_answered_before_the_first_weights_and_both_servers_take_them(seen: dict[str, Any]) -> None:
    assert "version 0 is not here" in seen["before_any"]
    assert seen["first"] == dict.fromkeys(SERVERS)
    assert max(seen["version_0"]) <= FP32


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "tensors never came, among them model.layers.1.mlp.up_proj.weight"),
        ("wrong_shape", "tensor model.layers.1.mlp.up_proj.weight has the shape"),
        ("unknown", "the model has no tensor model.layers.2.mlp.up_proj.weight"),
        ("cut_off", "the trainer is gone"),
    ],
)
def test_old_version_keeps_serving_when_a_load_fails(seen: dict[str, Any], fault: str, words: str) -> None:
    outcome = seen["faults"][fault]
    assert outcome["errors"].keys() == SERVERS
    assert all(words in error for error in outcome["errors"].values()), outcome["errors"]
    assert outcome["old_version"] <= FP32
    assert "version 1" in outcome["new_version"]


def test_next_publication_works_and_late_segments_still_find_their_version(seen: dict[str, Any]) -> None:
    assert seen["then"] == dict.fromkeys(SERVERS)
    assert seen["version_0_after_sync"] <= FP32
    assert max(seen["version_1"]) <= FP32


def test_requests_wait_while_serving_is_paused(seen: dict[str, Any]) -> None:
    assert seen["paused"] == [False, True]


def test_ranks_that_compute_together_do_not_beside_collectives_of_a_transfer_and_go_on_after_it(
    seen: dict[str, Any],
) -> None:
    assert seen["beside_a_transfer"] == [[False, True], [True, True]], "servers of two ranks, of one"


def test_when_a_rank_dies_its_server_ends_and_the_other_one_answers(seen: dict[str, Any]) -> None:
    assert seen["after_a_rank_died"] <= FP32
    assert seen["asked_from_now_on"] == ["model_engine_1"]


@pytest.mark.parametrize(
    ("errors", "raised", "words"),
    [
        ([RuntimeError("connection closed by peer"), ActorDiedError()], EngineLost, "a rank died"),
        ([RuntimeError("out of memory"), None], RuntimeError, "out of memory"),
        ([None, TimeoutError()], EngineLost, "did not answer within 1 s"),
    ],
)
async def test_server_learns_of_a_dead_rank_though_another_one_fails_for_it_first(
    errors: list[Exception | None], raised: type[Exception], words: str
) -> None:
    async def promote(_: int, error: Exception | None) -> None:
        if isinstance(error, TimeoutError):
            await asyncio.sleep(60)
        await asyncio.sleep(0.1 if isinstance(error, ActorDiedError) else 0)
        if error is not None:
            raise error

    workers: list[Any] = [
        SimpleNamespace(promote=SimpleNamespace(remote=lambda v, e=error: promote(v, e))) for error in errors
    ]
    ranks = Ranks(workers, timeout_s=1)
    with pytest.raises(raised, match=words):
        await ranks.promote(1)


def test_rows_are_dealt_in_equal_numbers_and_every_row_is_computed() -> None:
    dealt = deal([3, 9, 4, 7, 5], shares=2)
    assert [len(rows) for rows in dealt] == [3, 3]
    assert {row for rows in dealt for row in rows} == set(range(5))
    assert deal([8], shares=3) == [[0], [0], [0]]
    tokens = [sum([10, 9, 8, 7][row] for row in rows) for rows in deal([10, 9, 8, 7], shares=2)]
    assert tokens == [17, 17]

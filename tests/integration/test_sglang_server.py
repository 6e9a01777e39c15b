# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server answers only with complete weights, and knows which version sampled each token.

SGLang needs a process of its own, so one server plays all scenes (sglang_scenes.py) and reports what it saw.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from engine_program import BOUNDS, seen_by

from recipe.async_engine.core.errors import RequestFailed
from recipe.async_engine.engines.http_gate import SERVED
from recipe.async_engine.engines.sglang.requests import checking
from recipe.laptop.task import TaskSettings, ensure_task

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed")

CLOSE, FAR = BOUNDS["float32"]
CASES = ("greedy", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    task = ensure_task(tmp_path_factory.mktemp("task") / "builtin", TaskSettings())
    return seen_by("sglang_scenes.py", "cpu", str(task.model), timeout_s=600)


def test_requests_wait_for_the_first_weights_and_are_answered_by_them(seen: dict[str, Any]) -> None:
    first = seen["first_weights"]
    assert first["early"] == [False, False], "of the actor and over HTTP"
    assert first["tokens"] == [seen["token_of"][0]] * len(first["log_probs"])
    assert first["stop_reason"] == "completed" and first["versions"] == [0, 0]
    assert min(first["log_probs"]) > -1e-3, "each token was certain"
    assert first["http"] == 200


def test_http_requests_reach_what_generates_and_wait_like_others(seen: dict[str, Any]) -> None:
    found = seen["endpoints"]
    assert found["passed"] and {path for _, path in found["passed"]} <= SERVED
    refused = {tuple(pair) for pair in found["refused"]}
    assert {("POST", "/generate"), ("POST", "/update_weights_from_tensor"), ("POST", "/abort_request")} < refused
    # SGLang executes these for a GET request too.
    assert {("GET", "/flush_cache"), ("GET", "/release_memory_occupation"), ("GET", "/slow_down")} < refused
    assert found["reading"] == [200, 200, 200]
    assert not found["early"], "a paused server's request waits"
    assert found["status"] == 200
    assert found["said"] == [seen["token_of"][found["straggler"]["version"]]] * 4


def test_nothing_is_computed_between_pause_and_swap(seen: dict[str, Any]) -> None:
    straggler = seen["endpoints"]["straggler"]
    assert not straggler["early"]
    assert straggler["said"] == [seen["token_of"][straggler["version"]]] * 4


def test_answers_that_the_engine_keeps_go_on_with_the_versions_of_their_tokens(seen: dict[str, Any]) -> None:
    for answer in seen["held"]:
        runs = answer["runs"]
        assert answer["tokens"] == tokens_of(runs, seen) and len(answer["tokens"]) == answer["asked"]
        assert answer["log_prob"] > -1e-3
        assert answer["versions"][0] <= runs[0][0] and answer["versions"][1] == runs[-1][0]
        assert bool(answer["recomputed"]) == (len(runs) > 1)
    assert sum(len(answer["runs"]) > 1 for answer in seen["held"]) > 1, "otherwise this would show nothing"


def test_tokens_that_are_fetched_under_way_have_their_versions(seen: dict[str, Any]) -> None:
    told = seen["held"][0]["told"]
    assert any(tokens for tokens, _ in told)
    assert all(tokens == tokens_of(runs, seen) for tokens, runs in told)


def test_complete_answer_on_its_way_at_a_swap_is_of_the_old_version(seen: dict[str, Any]) -> None:
    late = seen["late"]
    assert not late["early"], "otherwise it was not on its way"
    assert late["runs"] == [[late["old"], 20]]
    assert late["tokens"] == tokens_of(late["runs"], seen)


def test_interrupted_answer_has_the_old_versions_tokens_and_goes_on_with_the_new_ones(seen: dict[str, Any]) -> None:
    found = seen["interrupted"]
    old, new = (seen["token_of"][found["old"] + more] for more in (0, 1))
    tokens, runs, log_probs = found["told"]
    assert tokens == [old] * len(tokens) and runs == [[found["old"], len(tokens)]] and len(log_probs) == len(tokens)
    (piece, piece_ended, piece_by), (rest, rest_ended, rest_by) = found["piece"], found["rest"]
    assert len(piece) >= len(tokens) and piece == [old] * len(piece)
    assert rest and rest == [new] * len(rest) and len(piece) + len(rest) == found["asked"]
    assert (piece_ended, rest_ended) == ("abort", "completed")
    assert (piece_by, rest_by) == (found["old"], found["old"] + 1)


@pytest.mark.parametrize("case", CASES)
def test_answer_has_the_same_tokens_whether_it_is_interrupted_held_or_left_alone(
    seen: dict[str, Any], case: str
) -> None:
    """With the same weights before and after, under parameters that depend on earlier tokens."""
    for answer in seen["cut"][case]:
        assert answer["cut"] == answer["whole"]
        assert answer["log_probs"] == len(answer["whole"])
        assert answer["difference"] < CLOSE


def test_answers_of_each_kind_were_cut(seen: dict[str, Any]) -> None:
    """Otherwise the test above would show nothing. On a busy machine an answer may end before it is cut."""
    for of_kind in zip(*seen["cut"].values(), strict=True):
        assert any(answer["cuts"] for answer in of_kind)


def test_dropped_request_frees_its_place_at_once(seen: dict[str, Any]) -> None:
    found = seen["dropped"]
    assert found["before"] == 0, "otherwise there was a free place"
    assert found["answer"] == 4 and found["unfinished"] == len(found["others"]) == 3
    assert found["others"] == [200] * 3
    assert found["dropped"] == found["early"] == [[], "aborted"]
    assert found["left"] == found["states"] == []


def test_broken_stream_is_refused_and_the_old_weights_answer(seen: dict[str, Any]) -> None:
    words = {"missing": "qkv_proj.weight", "NaN": "qkv_proj.weight", "shape": "shape"}
    for damage, error, live, said in seen["refused"]:
        assert said == [seen["token_of"][live]] * 4
        assert words[damage] in error if damage in words else error is None
    assert [damage for damage, *_ in seen["refused"]] == [*words, "none"]


def test_failed_swap_leaves_the_server_closed_until_complete_weights_come(seen: dict[str, Any]) -> None:
    found = seen["swap_of_nothing"]
    assert "is not staged" in found["error"] and not found["early"]
    assert found["said"] == [seen["token_of"][found["version"]]] * 4


def test_failed_load_over_the_live_weights_leaves_the_server_closed(seen: dict[str, Any]) -> None:
    found = seen["in_place"]
    assert "qkv_proj.weight" in found["error"] and not found["early"]
    assert found["said"] == [seen["token_of"][found["version"]]] * 4
    assert found["submitted"] == found["version"]


def test_engine_that_slept_answers_with_the_weights_with_which_it_woke(seen: dict[str, Any]) -> None:
    slept = seen["slept"]
    assert (slept["cut"], slept["early"]) == ("abort", False)
    assert slept["said"] == [seen["token_of"][slept["version"]]] * 4


def test_after_a_swap_nothing_is_computed_with_prefixes_of_older_weights(seen: dict[str, Any]) -> None:
    cached = seen["cached"]
    assert max(cached[way] for way in ("interrupt", "keep", "again")) < CLOSE
    assert cached["without dropping it"] > FAR and cached["of another version"] > FAR, "otherwise this shows nothing"


def test_a_full_engine_takes_the_oldest_group_first_also_after_a_swap(seen: dict[str, Any]) -> None:
    assert [order[0] for order in seen["by_age"]] == [3, 3]
    assert all(sorted(order) == [3, 5, 7, 9] for order in seen["by_age"])
    assert all(order.index(5) < order.index(9) for order in seen["by_age"])


def test_all_sampled_tokens_are_counted(seen: dict[str, Any]) -> None:
    activity = seen["activity"]
    assert activity["under_way"] == 0
    # Only the dropped request has tokens without an answer.
    assert 0 < activity["sampled"] - activity["answered"] < 120


def tokens_of(runs: list[list[int]], seen: dict[str, Any]) -> list[int]:
    return [seen["token_of"][version] for version, count in runs for _ in range(count)]


@pytest.mark.parametrize("parameters", [{"min_new_tokens": 4}, {"stop": ["."]}, {"stop_regex": "[0-9]"}])
@pytest.mark.parametrize("batch", [False, True])
async def test_what_an_engine_without_a_tokenizer_would_die_of_is_refused(
    parameters: dict[str, Any], batch: bool
) -> None:
    reached: list[Any] = []

    async def generate(obj: Any, request: Any = None) -> AsyncIterator[str]:
        reached.append(obj)
        yield "answer"

    async def ask(given: Any, tokenizer: Any = None) -> list[str]:
        manager = SimpleNamespace(tokenizer=tokenizer, generate_request=generate)
        return [output async for output in checking(manager)(SimpleNamespace(sampling_params=given))]

    harmless = {"temperature": 1.0, "min_new_tokens": 0, "stop": None}
    with pytest.raises(RequestFailed, match=rf"{next(iter(parameters))}: .*skip_tokenizer_init=false"):
        await ask([harmless, parameters] if batch else parameters)
    assert reached == []
    assert await ask(harmless) == await ask(parameters, tokenizer=object()) == ["answer"]

# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine answers with its live weights until the staged ones are swapped in, and with those exactly after.

vLLM picks its platform at import, so each model's engine runs in a fresh interpreter and reports what it saw. The
end-to-end runs have qwen3's, so here it is one of the long tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_program import BOUNDS, seen_by
from staged_engine_checks import EXPERTS, check_architectures, check_seen

CLOSE, FAR = BOUNDS["float32"]


@pytest.fixture(scope="module", params=[pytest.param("qwen3", marks=pytest.mark.slow), "qwen2"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return seen_by("staged_engine.py", "cpu", request.param, str(tmp_path_factory.mktemp("model")))


def test_staging_changes_no_answer(seen: dict[str, Any]) -> None:
    assert seen["at_start"] < CLOSE
    assert all(problem is None and difference < CLOSE for problem, difference in seen["staged"])
    assert len(seen["staged"]) == 4


def test_after_a_swap_the_engine_has_the_new_weights_and_none_of_the_old(seen: dict[str, Any]) -> None:
    assert all(new < CLOSE and old > FAR for new, old in seen["swapped"])
    assert len(seen["swapped"]) == 4


def test_a_version_that_lacks_any_part_is_refused_by_name_and_changes_no_answer(seen: dict[str, Any]) -> None:
    words = ("layers.1.self_attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight", "embed_tokens.weight")
    for (problem, difference), word in zip(seen["refused"], words * 2, strict=True):
        assert word in problem and difference < CLOSE


def test_a_prefix_that_older_weights_computed_is_the_trap_that_the_salt_keeps_requests_from(
    seen: dict[str, Any], record_property: Any
) -> None:
    cached = seen["cached"]
    record_property("log_prob_error_by_salt", cached)
    assert cached["before"] < CLOSE
    assert cached["of the version before"] > FAR, "otherwise this would show nothing"
    assert cached["of its own"] < CLOSE


def test_requests_that_go_on_after_a_cut_sample_what_they_would_have_whole(seen: dict[str, Any]) -> None:
    """Of every kind of sampling parameter; with the real client and server in test_cut_answers.py."""
    assert not seen["cut"]["differences"]
    assert seen["cut"]["cuts"] >= 60


@pytest.mark.slow
def test_an_adapter_is_the_engines_after_its_swap_and_one_with_parts_that_vllm_ignores_is_refused(
    tmp_path: Path,
) -> None:
    found = seen_by("adapter_engine.py", "cpu", "qwen2", str(tmp_path))
    assert "no layer for 1 parts" in found["odd"] and "layers.0.nowhere" in found["odd"]
    problem, difference = found["first"]
    assert problem is None and difference < CLOSE and found["staged"] < CLOSE
    problem, new, old = found["swapped"]
    assert problem is None and new < CLOSE and old > FAR


@pytest.mark.slow
def test_what_is_measured_on_accelerators_holds_in_bf16_here(tmp_path: Path) -> None:
    """As tests/gpu does; a CPU's sleep is none."""
    figures = check_seen(seen_by("staged_engine.py", "cpu", "qwen3", str(tmp_path), "bfloat16"), *BOUNDS["bfloat16"])
    assert figures["largest_difference"] > BOUNDS["float32"][0]


@pytest.mark.slow
def test_experts_that_are_measured_on_accelerators_hold_in_bf16_here(tmp_path: Path) -> None:
    """As tests/gpu does, where graphs are captured too."""
    found = seen_by("architecture_engine.py", "cpu", EXPERTS, str(tmp_path), "device", "bfloat16")
    check_architectures(found, *BOUNDS["bfloat16"])

# SPDX-License-Identifier: Apache-2.0
"""Every sampling parameter of vLLM's has a line that says how it spans a cut, and docs have them all."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_engine.core.cuts import SAMPLED, SPANS, refused, sampled_before

CHECKOUT = Path(__file__).parents[2]
# Of a release of vLLM that verl takes and that is not the one installed.
OF_OTHERS = {"prompt_logprob_start", "prompt_logprob_token_ids", "trace_decode_token_ids", "watermarking"}


def fields_of_vllm() -> set[str]:
    """Names of the sampling parameters of the vLLM that is installed, by its source: its import takes seconds."""
    found = find_spec("vllm")
    assert found is not None and found.submodule_search_locations
    module = ast.parse((Path(found.submodule_search_locations[0]) / "sampling_params.py").read_text())
    of_class = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams")
    return {node.target.id for node in of_class.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]


def test_every_sampling_parameter_has_a_line() -> None:
    assert set(SPANS) - OF_OTHERS == fields_of_vllm()


def test_the_documentation_has_every_sampling_parameter_that_a_user_sets() -> None:
    text = (CHECKOUT / "docs" / "partial-rollout.md").read_text()
    assert not [name for name in SPANS if not name.startswith("_") and f"`{name}`" not in text]


@pytest.mark.parametrize("given", [{"n": 2}, {"n": 0}, {"output_kind": 1}, {"output_kind": SimpleNamespace(value=1)}])
def test_what_no_answer_can_be_asked_for_with_is_refused_by_name(given: dict[str, Any]) -> None:
    assert str(refused(given)).startswith(next(iter(given)))


@pytest.mark.parametrize("given", [{}, {"n": 1}, {"n": None}, {"output_kind": 0}, {"output_kind": 2, "seed": 3}])
def test_what_spans_a_cut_is_not_refused(given: dict[str, Any]) -> None:
    assert refused(given) is None


@pytest.mark.parametrize("extra", [None, {}, {"a_users": 1}])
def test_a_request_that_was_not_cut_has_no_tokens_before(extra: dict[str, Any] | None) -> None:
    assert sampled_before(SimpleNamespace(extra_args=extra)) == []
    assert sampled_before(SimpleNamespace(extra_args={**(extra or {}), SAMPLED: [4, 5]})) == [4, 5]
    assert sampled_before({}) == []

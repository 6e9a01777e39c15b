# SPDX-License-Identifier: Apache-2.0
"""The documentation says of every sampling parameter of vLLM's how it spans a cut, and what does not is refused."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_engine.core.cuts import SAMPLED, refused, sampled_before

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


def test_the_documentation_has_every_sampling_parameter_and_no_other() -> None:
    text = (CHECKOUT / "docs" / "partial-rollout.md").read_text()
    rows = re.search(r"\| sampling parameters \|.*?\n\n", text, re.DOTALL)
    assert rows is not None
    documented = {
        name for row in rows[0].strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert documented - OF_OTHERS == {name for name in fields_of_vllm() if not name.startswith("_")}


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

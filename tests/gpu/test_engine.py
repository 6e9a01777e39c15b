# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine on an accelerator, in bf16, whose weights are staged on the device and in the host, and swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_program import BOUNDS, seen_by
from staged_engine_checks import EXPERTS, check_architectures, check_seen

EACH_WAY = pytest.mark.parametrize("graphs", ["", "graphs"], ids=["eager", "graphs"])


@EACH_WAY
def test_staged_weights_answer_after_their_swap_only_also_after_a_sleep(
    accelerators: int, graphs: str, tmp_path: Path, note: Any
) -> None:
    seen = seen_by("staged_engine.py", "cuda", "qwen3", str(tmp_path), "bfloat16", graphs)
    note(**check_seen(seen, *BOUNDS["bfloat16"]))


@EACH_WAY
def test_experts_and_the_biases_of_routers_are_those_of_each_swap(
    accelerators: int, graphs: str, tmp_path: Path, note: Any
) -> None:
    found = seen_by("architecture_engine.py", "cuda", EXPERTS, str(tmp_path), "device", "bfloat16", graphs)
    note(**check_architectures(found, *BOUNDS["bfloat16"]))

# SPDX-License-Identifier: Apache-2.0
"""After each swap a real engine's log-probs are a fresh engine's, for what each architecture has of its own.

vLLM makes groups of processes for experts only if its first model has some, so these have a process of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_program import BOUNDS, seen_by
from staged_engine_checks import check_architectures
from tiny_architectures import ARCHITECTURES

QUICK = ["glm4_moe, router bias", "gpt_oss, sinks"]
GROUPS = {
    "dense": ["llama", "llama, tied", "qwen2", "qwen3", "phi3, packed in the checkpoint", "granite", "cohere"],
    "dense, more": ["stablelm", "olmo2", "falcon_h1, hybrid"],
    "windows": [
        "mistral, sliding window",
        "gemma2, sliding window",
        "gemma3, sliding window",
        "cohere2, sliding window",
    ],
    "experts": ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "qwen3_next, hybrid"],
    "router biases": [
        "deepseek_v2, latent attention",
        "deepseek_v3, router bias",
        "ernie4_5_moe, router bias",
        "glm4_moe, multi-token",
    ],
}


def test_every_architecture_is_in_a_group() -> None:
    assert sorted([*QUICK, *(name for group in GROUPS.values() for name in group)]) == sorted(ARCHITECTURES)


def check(names: list[str], folder: Path, how: str) -> None:
    found: dict[str, Any] = seen_by("architecture_engine.py", "cpu", ";".join(names), str(folder), how)
    assert list(found) == names
    check_architectures(found, *BOUNDS["float32"])


def test_experts_router_biases_and_sinks_are_those_of_each_swap(tmp_path: Path) -> None:
    check(QUICK, tmp_path, "device")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_each_architecture_has_the_weights_of_each_swap(group: str, tmp_path: Path) -> None:
    check(GROUPS[group], tmp_path, "device")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["qwen3_moe", *QUICK], ["qwen3", "gemma2, sliding window"]], ids=["experts", "dense"]
)
def test_so_it_is_from_host_memory(names: list[str], tmp_path: Path) -> None:
    check(names, tmp_path, "from the host")

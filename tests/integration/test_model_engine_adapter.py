# SPDX-License-Identifier: Apache-2.0
"""A rank of a log-prob server: what it computes before and after an update of its weights, and what it refuses.

The engines are verl's over gloo; Megatron's have stand-ins for Transformer Engine. See model_engine_scenarios.py.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_program import seen_by
from server_log_probs import check_close
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.async_engine.log_prob_servers.adapter import keep_frequencies
from recipe.laptop.choice import CPU_ENVIRONMENT

BF16 = "fsdp2-qwen3-untied-dp1-tp1-pp1-padded-bf16"
SCENARIOS = (
    "fsdp2-qwen3-untied-dp1-tp1-pp1-padded",
    "fsdp2-qwen2-tied-dp2-tp1-pp1-padded",
    BF16,
    "fsdp2-qwen3_moe-untied-dp1-tp1-pp1-padded",
    "fsdp2-qwen2_moe-untied-dp2-tp1-pp1-padded",
    "megatron-qwen3-untied-dp1-tp1-pp1-packed",
    "megatron-qwen2-tied-dp1-tp1-pp1-padded",
    "megatron-qwen3-tied-dp1-tp2-pp1-packed",
    "megatron-qwen2-untied-dp1-tp2-pp1-packed",
    "megatron-qwen2-tied-dp1-tp1-pp2-packed",
    "megatron-qwen3-untied-dp1-tp1-pp2-packed",
    "megatron-qwen3_moe-untied-dp1-tp1-pp2-packed",
    "megatron-qwen3_moe-untied-dp2-tp1-pp1-packed-ep2",
)
PROGRAM_S = 600
# From Hugging Face's log-probs and entropies, fp32.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def seen() -> dict[str, list[dict[str, Any]]]:
    """By scenario, what each rank saw."""
    program = Path(__file__).with_name("model_engine_scenarios.py")
    environment = os.environ | CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"scenario"')]
    assert [line["scenario"] for line in lines] == list(SCENARIOS)
    return {line["scenario"]: line["ranks"] for line in lines}


@pytest.mark.parametrize("scenario", [scenario for scenario in SCENARIOS if scenario != BF16])
def test_log_probs_and_entropy_are_hugging_faces_before_and_after_a_streamed_update(
    scenario: str, seen: dict[str, list[dict[str, Any]]]
) -> None:
    ranks = seen[scenario]
    assert not [rank["traceback"] for rank in ranks if "traceback" in rank]
    for moment in ("at_first", "staged", "promoted"):
        differences = [rank[moment] for rank in ranks if rank[moment] is not None]
        assert differences and max(differences) <= TOLERANCE, (moment, differences)
    assert all(rank["exported"] for rank in ranks)


def test_bf16_is_within_its_own_rounding(seen: dict[str, list[dict[str, Any]]]) -> None:
    """As far from fp32 as Hugging Face's forward in bf16 is, within a factor of two."""
    (rank,) = seen[BF16]
    assert rank["rounding"] > 100 * TOLERANCE
    for moment in ("at_first", "staged", "promoted"):
        assert TOLERANCE < rank[moment] <= 2 * rank["rounding"], moment


def test_weights_in_bf16_give_the_log_probs_of_fp32_ones_that_are_rounded_to_compute() -> None:
    """Bit for bit, once the frequencies of positions are exact again; over 1,024 positions it matters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes), dtype=torch.float32)
    ids = torch.randint(0, 128, (1, 1024))

    def log_probs(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(ids).logits.float().log_softmax(-1).gather(-1, ids.unsqueeze(-1))

    # As verl's engine makes a model of bf16 weights.
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    for parameter in model.parameters():
        # As FSDP2 computes with weights of fp32.
        parameter.data = parameter.data.bfloat16()
    assert not torch.equal(log_probs(rounded), log_probs(model))
    keep_frequencies(SimpleNamespace(module=rounded))
    assert torch.equal(log_probs(rounded), log_probs(model))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_the_model_cannot_take_is_refused_by_name_on_all_ranks(
    scenario: str, seen: dict[str, list[dict[str, Any]]]
) -> None:
    ranks = seen[scenario]
    part = "experts.2.up_proj.weight" if "_moe" in scenario else "up_proj.weight"
    for refused, words in (
        ("missing", f"never came, among them model.layers.1.mlp.{part}"),
        ("wrong_shape", f"model.layers.1.mlp.{part}"),
        ("unknown", f"no tensor model.layers.2.mlp.{part}"),
        ("cut_off", f"rank {len(ranks) - 1}: ConnectionError: the trainer is gone"),
    ):
        messages = {rank[refused] for rank in ranks}
        assert len(messages) == 1 and words in messages.pop(), refused


@pytest.mark.slow
def test_what_is_measured_on_accelerators_is_close_here(tmp_path: Path) -> None:
    """As tests/gpu does, with a small model."""
    program = Path(__file__).parents[1] / "gpu" / "server_log_probs.py"
    check_close(seen_by(str(program), "cpu", "fsdp2", str(tmp_path)))

# SPDX-License-Identifier: Apache-2.0
"""Merged LoRA weights as they are sent, on one rank and two; the model that is trained stays as it is, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verl.workers.engine import EngineRegistry

from recipe.async_engine.weights import lora_engine
from recipe.laptop.choice import CPU_ENVIRONMENT
from recipe.laptop.platform.engines import CPUFSDPEngineWithLMHead

ROUNDING = 1e-6


@pytest.fixture(scope="module", params=[1, 2])
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """By rank."""
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("lora_ranks.py")), str(request.param)],
        env=os.environ | CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    ranks = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    assert len(ranks) == request.param
    return ranks


def test_what_is_sent_is_what_peft_merges_by_the_base_models_names(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert max(rank["linear"], rank["embedding"]) <= ROUNDING
        assert rank["base"] > 1000 * ROUNDING


def test_the_trainers_weights_stay_bit_for_bit_also_while_a_stream_hangs(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["untouched"] and rank["untouched_by_a_broken_stream"]
        # verl has merged weights in training meanwhile; once it has not, its own way will do.
        assert not rank["untouched_in_verls_merge"]


def test_adapters_that_merged_weights_cannot_have_are_refused_by_name(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert "q_proj" in rank["dora"] and "Dora" in rank["dora"]
        assert "with a bias" in rank["bias"]
        assert "embed_tokens" in rank["tied"] and "lm_head" in rank["tied"]


def test_a_training_worker_on_an_accelerator_builds_the_engine_that_sends_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    # The registry is this process's, which other tests use too.
    for backend, engines in EngineRegistry._engines["language_model"].items():
        monkeypatch.setitem(EngineRegistry._engines["language_model"], backend, dict(engines))
    for _ in range(2):
        lora_engine.register("cuda", "nvidia")
        lora_engine.register("cpu", "cpu")
    for backend in ("fsdp", "fsdp2"):
        engine = EngineRegistry.get_engine_cls("language_model", backend)
        assert engine is lora_engine.LoraFSDPEngineWithLMHead
    assert issubclass(CPUFSDPEngineWithLMHead, lora_engine.LoraSending)

# SPDX-License-Identifier: Apache-2.0
"""SGLang as the rollout engine: what cannot run is refused, and settings that only vLLM reads are said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from test_config import (
    ACTOR,
    CPU,
    IN_TURNS,
    KEEP,
    MEGATRON,
    MERGED,
    MODEL,
    ROLLOUT,
    WEIGHTS,
    WHOLE,
    configured,
    refused,
)

from recipe.async_engine.config.facts import Resources
from recipe.async_engine.config.notices import notices
from recipe.async_engine.config.packages import needs
from recipe.async_engine.config.rules.engines import early_ends
from recipe.async_engine.config.rules.sglang import ON_CPU
from recipe.async_engine.config.validation import judge

ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"
SGLANG = {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.max_model_len": 129}
IN_HOST = {f"{WEIGHTS}.staging": "host"}
SGLANG_ON_CPU = {**CPU, **SGLANG, f"{ROLLOUT}.tensor_model_parallel_size": 1, ARGUMENTS: dict(ON_CPU)}


def test_sglang_runs_in_every_mode() -> None:
    for placed in ({}, WHOLE, IN_TURNS, KEEP, MEGATRON, MERGED, {f"{ROLLOUT}.scheduling_policy": "priority"}):
        assert refused(SGLANG | placed) == {}, placed
    assert refused(SGLANG_ON_CPU) == {}


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({f"{ROLLOUT}.data_parallel_size": 2}, f"{ROLLOUT}.data_parallel_size", "1 with"),
        ({f"{ROLLOUT}.pipeline_model_parallel_size": 2}, f"{ROLLOUT}.pipeline_model_parallel_size", "tensor"),
        (
            {f"{ROLLOUT}.tensor_model_parallel_size": 4, "rollout.n_gpus_per_node": 2, "rollout.nnodes": 2},
            f"{ROLLOUT}.tensor_model_parallel_size",
            "at most 2, the accelerators of a node",
        ),
        ({f"{MODEL}.lora_rank": 8, f"{ROLLOUT}.load_format": "auto"}, f"{MODEL}.lora.merge", "vLLM only"),
        ({f"{ROLLOUT}.max_model_len": 128}, f"{ROLLOUT}.max_model_len", "keeps free, 129"),
        ({f"{ARGUMENTS}.max_total_tokens": 128}, f"{ARGUMENTS}.max_total_tokens", "129"),
        ({f"{ARGUMENTS}.context_length": 100}, f"{ARGUMENTS}.context_length", "cut off"),
        ({f"{ARGUMENTS}.random_seed": 0}, f"{ARGUMENTS}.random_seed", "null with several replicas"),
        ({f"{ARGUMENTS}.speculative_algorithm": "NGRAM"}, f"{ARGUMENTS}.speculative_algorithm", "never tried"),
        ({f"{ROLLOUT}.quantization": "fp8"} | IN_HOST, f"{ROLLOUT}.quantization", "staging=none"),
        (
            MEGATRON
            | {
                f"{ROLLOUT}.enable_rollout_routing_replay": True,
                f"{ACTOR}.megatron": {"router_replay": {"mode": "R3"}},
            },
            f"{ROLLOUT}.enable_rollout_routing_replay",
            "verl 0.9.1 cannot read",
        ),
        (IN_TURNS | {f"{ARGUMENTS}.enable_memory_saver": False}, f"{ARGUMENTS}.enable_memory_saver", "true with"),
        ({f"{ARGUMENTS}.tp_size": 2}, f"{ARGUMENTS}.tp_size", f"Set {ROLLOUT}.tensor_model_parallel_size"),
        ({f"{ARGUMENTS}.load_format": "auto"}, f"{ARGUMENTS}.load_format", f"Set {ROLLOUT}.load_format"),
        ({f"{ARGUMENTS}.enable_dp_attention": True}, f"{ARGUMENTS}.enable_dp_attention", "how they share the model"),
        ({f"{ARGUMENTS}.tokenizer_worker_num": 2}, f"{ARGUMENTS}.tokenizer_worker_num", "1"),
        ({f"{ARGUMENTS}.incremental_streaming_output": True}, f"{ARGUMENTS}.incremental_streaming_output", "answers"),
        ({f"{ARGUMENTS}.skip_server_warmup": False}, f"{ARGUMENTS}.skip_server_warmup", "true"),
        ({f"{ARGUMENTS}.disaggregation_mode": "decode"}, f"{ARGUMENTS}.disaggregation_mode", "null"),
        ({f"{ARGUMENTS}.enable_hierarchical_cache": True}, f"{ARGUMENTS}.enable_hierarchical_cache", "older weights"),
        ({f"{ARGUMENTS}.cpu_offload_gb": 4}, f"{ARGUMENTS}.cpu_offload_gb", "format of the model's files"),
        ({f"{ARGUMENTS}.enable_deterministic_inference": True}, f"{ARGUMENTS}.enable_deterministic_inference", "seed"),
        ({f"{ARGUMENTS}.api_key": "x"}, f"{ARGUMENTS}.api_key", "docs/security.md"),
        *(
            (
                {**SGLANG_ON_CPU, ARGUMENTS: {key: value for key, value in ON_CPU.items() if key != name}},
                f"{ARGUMENTS}.{name}",
                f"set ++{ARGUMENTS}.{name}={str(value).lower()}",
            )
            for name, value in ON_CPU.items()
        ),
        ({**SGLANG_ON_CPU, f"{ROLLOUT}.free_cache_engine": True}, f"{ROLLOUT}.free_cache_engine", "no sleep mode"),
    ],
)
def test_what_cannot_run_with_sglang_is_refused_by_name(changes: Mapping[str, Any], setting: str, words: str) -> None:
    (problem,) = refused(SGLANG | changes).values()
    assert problem.setting == setting
    assert words in str(problem)


def test_what_only_one_of_the_engines_needs_is_not_asked_of_the_other() -> None:
    small = {f"{ROLLOUT}.max_num_batched_tokens": 8, f"{ROLLOUT}.logprobs_mode": "mine"}
    assert refused(small).keys() >= small.keys()
    assert refused(SGLANG | small) == {}
    asleep = {f"{ROLLOUT}.enable_sleep_mode": True, f"{ROLLOUT}.max_num_batched_tokens": 64}
    assert refused({**CPU, **asleep}).keys() >= asleep.keys()
    assert refused(SGLANG_ON_CPU | asleep) == {}
    of_sglang = {f"{ARGUMENTS}.tp_size": 2, f"{ARGUMENTS}.random_seed": 0}
    assert refused(of_sglang) == {}
    of_vllm = {
        f"{ROLLOUT}.engine_kwargs.vllm": {"scheduler_cls": "mine.S", "kv_transfer_config": {"kv_role": "kv_both"}}
    }
    assert set(refused(KEEP | of_vllm)) == {
        f"{ROLLOUT}.engine_kwargs.vllm.{name}" for name in ("scheduler_cls", "kv_transfer_config")
    }
    assert refused(SGLANG | KEEP | of_vllm) == {}
    # One replica draws its numbers alone.
    alone = {f"{ARGUMENTS}.random_seed": 0, f"{ROLLOUT}.tensor_model_parallel_size": 4}
    assert refused(SGLANG | alone) == {}


def test_a_full_answer_has_its_place_in_a_model_with_one_position_more() -> None:
    def said(engine: Mapping[str, Any], positions: int) -> list[str]:
        changes = {
            **engine,
            f"{ROLLOUT}.max_model_len": None,
            f"{MODEL}.override_config": {"max_position_embeddings": positions},
        }
        return list(early_ends(judge(configured(changes))[1]))

    assert said({}, 128) == said(SGLANG, 129) == []
    assert len(said(SGLANG, 128)) == 1


@pytest.mark.parametrize(
    ("engine", "setting", "value", "advice"),
    [
        (SGLANG, f"{ROLLOUT}.max_num_batched_tokens", 4096, "chunked_prefill_size"),
        (SGLANG, f"{ROLLOUT}.enable_prefix_caching", False, "disable_radix_cache"),
        (SGLANG, f"{ROLLOUT}.logprobs_mode", "raw_logprobs", "after the temperature"),
        (SGLANG, f"{ROLLOUT}.seed", 7, "a seed of its own"),
        (SGLANG, f"{ROLLOUT}.engine_kwargs.vllm", {"block_size": 16}, "only vLLM"),
        ({}, ARGUMENTS, {"schedule_policy": "lpm"}, "only SGLang"),
        ({}, f"{ROLLOUT}.skip_tokenizer_init", False, "only SGLang"),
    ],
)
def test_settings_of_the_other_engine_have_no_effect_and_that_is_said(
    engine: Mapping[str, Any], setting: str, value: Any, advice: str
) -> None:
    def said(changes: Mapping[str, Any]) -> list[str]:
        problems, context = judge(configured({f"{ROLLOUT}.max_num_batched_tokens": 8192} | changes))
        assert problems == []
        return [notice for notice in notices(context) if setting in notice]

    (notice,) = said({**engine, setting: value})
    assert "no effect" in notice and advice in notice
    assert said({**({} if engine else SGLANG), setting: value}) == []


def test_a_missing_sglang_is_refused_with_how_to_install_it() -> None:
    setting = f"{ROLLOUT}.name"
    for changes, how in ((SGLANG, "`uv pip install -e '.[sglang]'` with an override"), (SGLANG_ON_CPU, "`make setup`")):
        problem = refused(changes, available=Resources(None, absent=frozenset({"sglang==0.5.12"})))[setting]
        assert f"Install SGLang 0.5.12 by {how} (see docs/dependencies.md), or set it to vllm." in str(problem)
        assert refused(changes, available=Resources(None)) == {}
    assert not [need for need in needs(configured({})) if need.package.startswith("SGLang")]

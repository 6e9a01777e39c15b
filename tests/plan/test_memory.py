# SPDX-License-Identifier: Apache-2.0
"""Estimates of memory agree with published and measured figures, and what does not fit is refused or warned about."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from memory_figures import MEASURED, PUBLISHED, Figure, known
from test_config import TAUGHT, TEACHER, configured

from recipe.async_engine.config.facts import FileFact, Resources
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.validation import judge
from recipe.plan.memory import estimate as memory
from recipe.plan.memory.estimate import ERROR
from recipe.plan.memory.items import GIB
from recipe.plan.memory.shape import known_model, shape_of

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text("utf-8")
MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# Parameters as the authors publish them, in billions, and as transformers makes them on its `meta` device.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": (0.49, 494_032_768),
    "Qwen/Qwen2.5-1.5B": (1.54, 1_543_714_304),
    "Qwen/Qwen2.5-3B": (3.09, 3_085_938_688),
    "Qwen/Qwen2.5-7B-Instruct": (7.61, 7_615_616_512),
    "Qwen/Qwen3-4B-Base": (4.0, 4_022_468_096),
    "Qwen/Qwen3-8B": (8.2, 8_190_735_360),
    "Qwen/Qwen3-30B-A3B": (30.5, 30_532_122_624),
}


@pytest.mark.parametrize("figure", (*PUBLISHED, *MEASURED), ids=lambda figure: figure.what)
def test_estimate_is_near_what_was_published_or_measured(figure: Figure) -> None:
    assert abs(figure.error) <= ERROR
    assert figure.row() in PAGE, f"docs/memory.md lacks the row:\n{figure.row()}"


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_models_have_the_number_of_parameters_that_is_published(name: str) -> None:
    billions, exactly = PARAMETERS[name]
    assert known(name).parameters == exactly
    assert round(exactly / 1e9, 2) == pytest.approx(billions, abs=0.05)


def test_model_of_an_unknown_family_is_not_guessed() -> None:
    assert shape_of({**(known_model("Qwen/Qwen3-8B") or {}), "model_type": "deepseek_v3"}) is None
    assert shape_of({"model_type": "llama", "hidden_size": 64}) is None
    assert known_model("someone/else") is None


def judged(
    name: str, changes: dict[str, Any], device_bytes: int | None = None
) -> tuple[dict[str, Problem], RuleContext]:
    """Return the problems, by setting, of a changed configuration with this model, and what the rules looked at."""
    models = {f"{MODEL}.path": name} | {setting: path for setting, path in changes.items() if "model_path" in setting}
    facts = [FileFact(setting, path, "model", model_config=known_model(path)) for setting, path in models.items()]
    base = {f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_use_dynamic_bsz": True, f"{MODEL}.path": name}
    problems, context = judge(configured(base | changes), Resources(None, device_bytes), facts, 5000, [memory])
    return {problem.setting: problem for problem in problems}, context


def found(name: str, gib: float | None, changes: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the problems by setting, and the warnings, on accelerators of a size."""
    problems, context = judged(name, changes, None if gib is None else int(gib * GIB))
    return {setting: str(problem) for setting, problem in problems.items()}, memory.warnings(context)


def test_what_certainly_does_not_fit_is_refused_with_the_amounts_and_what_to_change() -> None:
    problems, _ = found("Qwen/Qwen2.5-7B", 80, {f"{ROLLOUT}.gpu_memory_utilization": 0.95})
    assert set(problems) == {f"{ROLLOUT}.gpu_memory_utilization"}
    message = problems[f"{ROLLOUT}.gpu_memory_utilization"]
    for said in (
        "rollout replica",
        "next weights 7.1 GiB",
        "weight-sync buckets 6.0 GiB",
        "weights.staging",
        "of 80.0 GiB",
    ):
        assert said in message
    staged_elsewhere = {f"{ROLLOUT}.gpu_memory_utilization": 0.9, "async_training.weights.staging": "host"}
    assert found("Qwen/Qwen2.5-7B", 80, staged_elsewhere)[0] == {}


def test_what_is_near_is_warned_about() -> None:
    problems, warnings = found("Qwen/Qwen2.5-7B", 80, {f"{ROLLOUT}.gpu_memory_utilization": 0.8})
    assert problems == {}
    assert [re.match(r"may not fit: rollout replica", warning) is not None for warning in warnings] == [True]


def test_without_a_size_of_the_device_nothing_is_refused_and_a_setting_gives_one() -> None:
    assert found("Qwen/Qwen3-30B-A3B", None, {}) == ({}, [])
    problems, _ = found("Qwen/Qwen3-30B-A3B", None, {"async_training.device_memory_gib": 24})
    assert f"{ACTOR}.ppo_max_token_len_per_gpu" in problems


IN_TURNS = {
    "async_training.placement": "shared",
    "async_training.trigger_parameter_sync_step": 1,
    f"{ROLLOUT}.gpu_memory_utilization": 0.8,
    "actor_rollout_ref.hybrid_engine": True,
}


def test_training_that_stays_beside_a_waking_engine_is_refused_and_offloading_cures_it() -> None:
    """A 30B mixture of experts takes turns with Megatron's training, with a memory share of 0.8."""
    megatron = {
        "model_engine": "megatron",
        f"{ACTOR}.strategy": "megatron",
        f"{ACTOR}.megatron": {
            "tensor_model_parallel_size": 4,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "override_transformer_config": {"recompute_granularity": "full"},
        },
        "trainer.nnodes": 4,
        "trainer.n_gpus_per_node": 8,
        f"{ROLLOUT}.tensor_model_parallel_size": 4,
    }
    problems, _ = found("Qwen/Qwen3-30B-A3B", 80, IN_TURNS | megatron)
    assert set(problems) == {f"{ROLLOUT}.gpu_memory_utilization"}
    assert "accelerator in turns, generation" in problems[f"{ROLLOUT}.gpu_memory_utilization"]
    offload = {f"{ACTOR}.megatron.param_offload": True, f"{ACTOR}.megatron.optimizer_offload": True}
    assert found("Qwen/Qwen3-30B-A3B", 80, IN_TURNS | megatron | offload) == ({}, [])


def test_expert_parallel_sizes_count_the_tensor_parallel_size_that_megatron_takes_where_none_is_set() -> None:
    megatron = {
        "model_engine": "megatron",
        f"{ACTOR}.strategy": "megatron",
        f"{ACTOR}.megatron": {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4},
    }
    problems, _ = found("Qwen/Qwen3-30B-A3B", None, megatron)
    assert set(problems) == {f"{ACTOR}.megatron.expert_model_parallel_size"}
    assert "expert_tensor_parallel_size=null means 4" in problems[f"{ACTOR}.megatron.expert_model_parallel_size"]


def test_teacher_is_a_part_with_weights_cache_and_the_logits_of_an_answer() -> None:
    _, context = judged("Qwen/Qwen2.5-0.5B", TAUGHT | {f"{TEACHER}.model_path": "Qwen/Qwen2.5-7B"}, 80 * GIB)
    part = memory.parts(context)[-1]
    assert (part.name, part.devices) == ("teacher teacher_model", 2)
    # Two accelerators share the weights; each has all logits of 64 + 64 tokens, in bf16 and fp32.
    items = {item.name: item.bytes for item in part.moments[0].items}
    weights = known("Qwen/Qwen2.5-7B").parameters // 2 * 2
    assert items["engine: weights"] == weights
    assert items["engine: KV cache and activations"] == 40 * GIB - weights
    assert items["logits of an answer"] == 128 * 152_064 * 6
    assert "requests of 128 tokens" in part.notes[0]


def test_teacher_that_does_not_fit_is_refused_by_its_own_setting() -> None:
    changes = TAUGHT | {f"{TEACHER}.model_path": "Qwen/Qwen3-30B-A3B"}
    share = f"{TEACHER}.inference.gpu_memory_utilization"
    context = judged("Qwen/Qwen2.5-0.5B", changes, 24 * GIB)[1]
    first, *_ = memory.problems(context)
    assert first.setting == share and "teacher teacher_model, log-probs: " in str(first)
    # The weights fit into the device, but not into the engine's share of it.
    problems, _ = found("Qwen/Qwen2.5-0.5B", 48, changes)
    assert set(problems) == {share} and "a KV cache of one request of" in problems[share]
    assert found("Qwen/Qwen2.5-0.5B", 80, changes)[0] == {}


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({f"{ROLLOUT}.tensor_model_parallel_size": 4}, f"{ROLLOUT}.tensor_model_parallel_size"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 4}, f"{ACTOR}.ulysses_sequence_parallel_size"),
        (
            {
                "model_engine": "megatron",
                f"{ACTOR}.strategy": "megatron",
                f"{ACTOR}.megatron": {"pipeline_model_parallel_size": 1, "expert_model_parallel_size": 2},
            },
            f"{ACTOR}.megatron.expert_model_parallel_size",
        ),
    ],
)
def test_parallel_sizes_that_do_not_divide_the_model_are_refused(changes: dict[str, Any], setting: str) -> None:
    # The model has 14 attention heads, 24 layers and no experts.
    assert set(found("Qwen/Qwen2.5-0.5B", None, changes)[0]) == {setting}


@pytest.mark.parametrize(
    ("changes", "less"),
    [
        ({f"{MODEL}.use_fused_kernels": True}, "logits"),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 4096}, "logits"),
        ({f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}, "optimizer"),
        ({"trainer.n_gpus_per_node": 8, f"{ACTOR}.ppo_mini_batch_size": 16}, "weights"),
        ({f"{ACTOR}.fsdp_config.model_dtype": "bf16"}, "weights"),
        ({f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 256}, "weight-sync buckets"),
        ({f"{ACTOR}.fsdp_config.offload_policy": True}, "optimizer"),
    ],
)
def test_settings_that_save_memory_are_seen(changes: dict[str, Any], less: str) -> None:
    assert update_items(changes).get(less, 0) < update_items({})[less]


def test_keeping_gradients_whole_until_the_last_micro_batch_is_seen() -> None:
    whole = {f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation": True}
    more = update_items(whole)["gradients under way"] - update_items({})["gradients under way"]
    assert more == 4 * known("Qwen/Qwen2.5-3B").parameters


def update_items(changes: dict[str, Any]) -> dict[str, int]:
    _, context = judged("Qwen/Qwen2.5-3B", changes)
    trainer = memory.parts(context)[0]
    return {item.name: item.bytes for item in trainer.moments[0].items}

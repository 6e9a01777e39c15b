# SPDX-License-Identifier: Apache-2.0
"""Rules that depend on the model and on who computes log-probs: micro-batches, parallel sizes, memory."""

from __future__ import annotations

from typing import Any

import pytest
from test_config import ACTOR, GAE, IN_TURNS, MEGATRON, MEGATRON_SERVERS, MODEL, PROXIMAL, ROLLOUT, configured, refused
from test_memory import judged

from recipe.async_engine.config.facts import FileFact, Resources
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.engines import early_ends
from recipe.async_engine.config.sections import read_settings
from recipe.async_engine.config.validation import judge
from recipe.plan.memory import estimate as memory
from recipe.plan.memory.items import GIB
from recipe.plan.memory.shape import known_model

KL, IN_REWARD = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
REF, CRITIC = "actor_rollout_ref.ref", "critic"
BY_TOKENS = {
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 128,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 128,
}


def context(changes: dict[str, Any]) -> RuleContext:
    config = configured(changes)
    return RuleContext(config, read_settings(config)[0], None, None, ())


@pytest.mark.parametrize(
    ("changes", "uses"),
    [
        ({}, False),
        ({KL: True}, True),
        ({IN_REWARD: True}, True),
        ({KL: True, IN_REWARD: True}, True),
        ({KL: True, f"{MODEL}.lora_rank": 8}, False),
        ({KL: True, f"{MODEL}.lora.rank": 8}, False),
        ({KL: True, f"{MODEL}.lora_rank": 0}, True),
        ({KL: True, f"{MODEL}.lora_adapter_path": "/adapter"}, False),
        ({f"{MODEL}.lora_rank": 8}, False),
    ],
)
def test_trainer_has_a_reference_policy_where_something_is_compared_with_it_and_the_base_is_not_it(
    changes: dict[str, Any], uses: bool
) -> None:
    assert context(changes).uses_reference is uses


@pytest.mark.parametrize(
    ("source", "scores"), [("recompute", True), ("server", True), ("bypass", False), ("loglinear", False)]
)
def test_trainer_computes_log_probs_where_they_are_its_own_or_a_servers(source: str, scores: bool) -> None:
    assert context({PROXIMAL: source}).trainer_scores is scores


def test_number_of_nodes_that_is_missing_is_the_only_complaint() -> None:
    for setting in ("trainer.nnodes", "trainer.n_gpus_per_node"):
        assert set(refused(IN_TURNS | {setting: None})) == {setting}


def test_accelerators_that_both_sides_share_are_counted_once() -> None:
    assert refused(IN_TURNS, available=Resources(4)) == {}
    assert set(refused(IN_TURNS, available=Resources(3))) == {"trainer.n_gpus_per_node"}


@pytest.mark.parametrize(
    ("changes", "setting", "said"),
    [
        (BY_TOKENS | {f"{ACTOR}.ppo_max_token_len_per_gpu": 127}, f"{ACTOR}.ppo_max_token_len_per_gpu", "least 128"),
        (
            BY_TOKENS | {f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 127},
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
            "least 128",
        ),
        (
            BY_TOKENS | {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{ACTOR}.ppo_max_token_len_per_gpu": 63},
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            "at least 64. The longest sequence has data.max_prompt_length + max_response_length tokens, a share of it "
            "on each of 2 ranks: raise it.",
        ),
        # A critic's micro-batches are always sized by tokens, and by its own parallel sizes.
        (GAE | {f"{CRITIC}.ppo_max_token_len_per_gpu": 127}, f"{CRITIC}.ppo_max_token_len_per_gpu", "tokens: raise it"),
        (
            GAE | {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{CRITIC}.ppo_max_token_len_per_gpu": 127},
            f"{CRITIC}.ppo_max_token_len_per_gpu",
            "at least 128",
        ),
        (
            GAE
            | {f"{CRITIC}.ulysses_sequence_parallel_size": 2, f"{CRITIC}.model.use_remove_padding": True}
            | {f"{CRITIC}.ppo_max_token_len_per_gpu": 63},
            f"{CRITIC}.ppo_max_token_len_per_gpu",
            "at least 64",
        ),
        # Sized by sequences, each kind of work has a size that divides a rank's share of a step of 32 x 8 on 4 ranks.
        (
            {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": None},
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            "an integer >= 1",
        ),
        (
            {KL: True, f"{REF}.log_prob_micro_batch_size_per_gpu": None},
            f"{REF}.log_prob_micro_batch_size_per_gpu",
            "an integer >= 1",
        ),
        (
            {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 48},
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            "a divisor of 64, the trajectories of a rank's batch",
        ),
        (
            {KL: True, f"{REF}.log_prob_micro_batch_size_per_gpu": 48},
            f"{REF}.log_prob_micro_batch_size_per_gpu",
            "a divisor of 64, the trajectories of a rank's batch",
        ),
    ],
)
def test_micro_batches_that_have_no_size_no_room_or_do_not_divide_are_refused(
    changes: dict[str, Any], setting: str, said: str
) -> None:
    problems = refused(changes)
    assert set(problems) == {setting}
    assert said in str(problems[setting])


@pytest.mark.parametrize(
    "changes",
    [
        BY_TOKENS,
        {f"{ACTOR}.ppo_max_token_len_per_gpu": 1},
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 64},
        {KL: True, f"{REF}.log_prob_micro_batch_size_per_gpu": 64},
        {f"{REF}.log_prob_micro_batch_size_per_gpu": None},
        {f"{REF}.log_prob_micro_batch_size_per_gpu": 48},
        {PROXIMAL: "bypass", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 48},
    ],
)
def test_sizes_that_fit_or_are_of_work_that_is_not_done_are_taken(changes: dict[str, Any]) -> None:
    assert refused(changes) == {}


PIPELINE = {"trainer.n_gpus_per_node": 10, f"{ACTOR}.ppo_mini_batch_size": 20}
ENGINE = "model_engine_server.engine"


@pytest.mark.parametrize(
    ("name", "changes", "setting"),
    [
        # The model has 24 layers, 14 heads and no experts.
        ("Qwen/Qwen2.5-0.5B", MEGATRON | {f"{ACTOR}.megatron": {}}, None),
        (
            "Qwen/Qwen2.5-0.5B",
            MEGATRON | PIPELINE | {f"{ACTOR}.megatron.pipeline_model_parallel_size": 5},
            f"{ACTOR}.megatron.pipeline_model_parallel_size",
        ),
        (
            "Qwen/Qwen2.5-0.5B",
            MEGATRON
            | PIPELINE
            | {
                f"{ACTOR}.megatron.pipeline_model_parallel_size": 5,
                f"{ACTOR}.megatron.override_transformer_config": {"num_layers_in_first_pipeline_stage": 4},
            },
            None,
        ),
        (
            "Qwen/Qwen2.5-0.5B",
            MEGATRON_SERVERS | {f"{ENGINE}.tensor_model_parallel_size": 4},
            f"{ENGINE}.tensor_model_parallel_size",
        ),
        ("Qwen/Qwen2.5-0.5B", {f"{ENGINE}.tensor_model_parallel_size": 4}, None),
        # The model has 128 experts, 32 heads and 48 layers.
        (
            "Qwen/Qwen3-30B-A3B",
            MEGATRON
            | {
                "trainer.n_gpus_per_node": 3,
                f"{ACTOR}.ppo_mini_batch_size": 15,
                f"{ACTOR}.megatron": {"expert_model_parallel_size": 3},
            },
            f"{ACTOR}.megatron.expert_model_parallel_size",
        ),
    ],
)
def test_parallel_sizes_divide_the_model_in_every_engine_that_there_is(
    name: str, changes: dict[str, Any], setting: str | None
) -> None:
    assert set(judged(name, changes)[0]) == ({setting} if setting else set())


LENGTH, OVERRIDE = f"{ROLLOUT}.max_model_len", f"{MODEL}.override_config"


def with_positions(changes: dict[str, Any], **config: Any) -> tuple[dict[str, Problem], list[str]]:
    """Return problems by setting, and warnings, if the policy's config.json is a 7B model's with these changes."""
    known = known_model("Qwen/Qwen2.5-7B") or {}
    model = FileFact(f"{MODEL}.path", "7B", "model", model_config={**known, **config})
    problems, context = judge(configured(changes), Resources(None, 80 * GIB), [model], 5000, [memory])
    return {problem.setting: problem for problem in problems}, list(early_ends(context))


@pytest.mark.parametrize(
    ("changes", "config", "refused"),
    [
        ({LENGTH: 4096}, {"max_position_embeddings": 4096}, False),
        ({LENGTH: 4097}, {"max_position_embeddings": 4096}, True),
        ({LENGTH: 4097}, {"text_config": {"max_position_embeddings": 4096}}, True),
        ({LENGTH: 4097}, {}, False),
        ({LENGTH: None}, {"max_position_embeddings": 4096}, False),
        ({LENGTH: 4097, OVERRIDE: {"max_position_embeddings": 8192}}, {"max_position_embeddings": 4096}, False),
        (
            {LENGTH: 4097, OVERRIDE: {"model_config": {"max_position_embeddings": 8192}}},
            {"max_position_embeddings": 4096},
            False,
        ),
    ],
)
def test_engine_is_no_longer_than_the_models_positions(
    changes: dict[str, Any], config: dict[str, Any], refused: bool
) -> None:
    problems, warned = with_positions(changes, **config)
    assert set(problems) == ({LENGTH} if refused else set())
    assert not refused or problems[LENGTH].allowed == "at most the model's 4096 positions"
    assert warned == []


def test_answers_that_end_with_the_models_positions_are_warned_about() -> None:
    problems, (warning,) = with_positions({LENGTH: None}, max_position_embeddings=100)
    assert problems == {}
    assert "the model has 100 positions" in warning and "128 tokens together" in warning
    assert with_positions({LENGTH: None}, max_position_embeddings=128) == ({}, [])


@pytest.mark.parametrize(
    ("changes", "config", "refused"),
    [
        # The engine has 40 GiB for weights and cache. Each of two ranks has 7.1 GiB of 7.6 billion weights, and a token
        # takes 28,672 bytes: 1,232,000 tokens at most.
        ({}, {"max_position_embeddings": 1_200_000}, False),
        ({}, {"max_position_embeddings": 1_300_000}, True),
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.08}, {"max_position_embeddings": 4096}, True),
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.1}, {"max_position_embeddings": 4096}, False),
        ({LENGTH: 4096}, {"max_position_embeddings": 1_300_000}, False),
        ({}, {"max_position_embeddings": 1_300_000, "sliding_window": 4096}, False),
        (
            {},
            {"max_position_embeddings": 1_300_000, "sliding_window": 4096, "use_sliding_window": False},
            True,
        ),
        (
            {f"{ROLLOUT}.engine_kwargs": {"vllm": {"kv_cache_dtype": "fp8"}}},
            {"max_position_embeddings": 1_300_000},
            False,
        ),
    ],
)
def test_engine_has_a_cache_for_one_request_of_the_longest_length(
    changes: dict[str, Any], config: dict[str, Any], refused: bool
) -> None:
    problems, _ = with_positions({LENGTH: None} | changes, **config)
    assert set(problems) == ({f"{ROLLOUT}.gpu_memory_utilization"} if refused else set())
    if refused:
        assert f"one request of {config['max_position_embeddings']} tokens" in str(
            problems[f"{ROLLOUT}.gpu_memory_utilization"]
        )


def test_longest_request_is_named_by_what_says_how_long_it_is() -> None:
    small = {f"{ROLLOUT}.gpu_memory_utilization": 0.08}
    for length, said in ((4096, f"lower {LENGTH}=4096"), (None, f"lower {LENGTH}, which defaults to the model's")):
        problems, _ = with_positions({LENGTH: length} | small, max_position_embeddings=4096)
        assert said in problems[f"{ROLLOUT}.gpu_memory_utilization"].advice


def test_memory_of_a_device_is_what_the_settings_say_before_what_was_found() -> None:
    asked = {"async_training.device_memory_gib": 80}
    for changes, found, expected in (({}, None, None), ({}, GIB, GIB), (asked, GIB, 80 * GIB), (asked, None, 80 * GIB)):
        context = RuleContext({}, read_settings(configured(changes))[0], None, Resources(None, found), ())
        assert memory.device_bytes(context) == expected


def test_what_is_refused_is_not_warned_about_and_a_warning_says_how_large_the_device_is() -> None:
    refusing, context = judged("Qwen/Qwen2.5-7B", {f"{ROLLOUT}.gpu_memory_utilization": 0.95}, 80 * GIB)
    assert refusing and memory.warnings(context) == []
    accepted, context = judged("Qwen/Qwen2.5-7B", {f"{ROLLOUT}.gpu_memory_utilization": 0.8}, 80 * GIB)
    (warning,) = memory.warnings(context)
    assert accepted == {} and " of 80.0 GiB (" in warning


def test_only_what_is_certain_to_be_too_much_is_refused_without_allowing_for_an_error() -> None:
    changes = {f"{ACTOR}.ppo_max_token_len_per_gpu": 200_000, f"{ROLLOUT}.gpu_memory_utilization": 0.1}
    _, context = judged("Qwen/Qwen2.5-3B", changes)
    certain = max(moment.certain for moment in memory.parts(context)[0].moments)
    setting = f"{ACTOR}.ppo_max_token_len_per_gpu"
    for device, allowed in ((certain, "what fits within 15% into"), (certain - 1, "what fits into")):
        assert judged("Qwen/Qwen2.5-3B", changes, device)[0][setting].allowed.startswith(allowed)


@pytest.mark.parametrize(
    ("family", "strategy", "is_refused"),
    [
        ("mixtral", "fsdp2", True),
        ("minimax_m2", "fsdp", True),
        ("mixtral", "megatron", False),
        ("qwen3_moe", "fsdp2", False),
    ],
)
def test_experts_that_the_engine_knows_by_other_names_are_refused(family: str, strategy: str, is_refused: bool) -> None:
    model = FileFact(f"{MODEL}.path", "8x7B", "model", model_config={"model_type": family})
    changes = MEGATRON if strategy == "megatron" else {f"{ACTOR}.strategy": strategy}
    problems, _ = judge(
        configured(changes | {f"{MODEL}.path": "8x7B"}), Resources(None, 80 * GIB), [model], 5000, [memory]
    )
    found = [problem for problem in problems if problem.setting == f"{MODEL}.path"]
    assert [problem.value for problem in found] == (["8x7B"] if is_refused else [])

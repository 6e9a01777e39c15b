# SPDX-License-Identifier: Apache-2.0
"""Settings are read with all their faults, plans are derived, and configurations that cannot run are refused."""

import copy
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipe.async_engine.config.facts import FileFact, Resources
from recipe.async_engine.config.fields import read_section
from recipe.async_engine.config.plan import derive, rehearses
from recipe.async_engine.config.problems import ConfigError, Problem
from recipe.async_engine.config.rules.batches import tight_bound
from recipe.async_engine.config.sections import SECTIONS, Alarms, AsyncTraining, read_settings
from recipe.async_engine.config.validation import judge
from recipe.async_engine.core.alarms import WATCHED
from recipe.async_engine.core.scoring import Anchor, ScoringSettings
from tools.config_docs import main as write_documentation
from tools.config_docs import render_document

CHECKOUT = Path(__file__).resolve().parents[2]

BASE: Mapping[str, Any] = {
    "model_engine": "dp",
    "async_training": {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 2, "require_batches": 2},
    "rollout": {"nnodes": 1, "n_gpus_per_node": 4, "n": 8, "total_rollout_steps": 1000},
    "data": {"train_batch_size": 0, "gen_batch_size": 1, "max_prompt_length": 64, "max_response_length": 64},
    "algorithm": {"adv_estimator": "grpo"},
    "critic": {"enable": None},
    "reward": {"num_workers": 1},
    "trainer": {
        "device": "cuda",
        "nnodes": 1,
        "n_gpus_per_node": 4,
        "total_epochs": 3,
        "total_training_steps": None,
        "save_freq": -1,
        "test_freq": 5,
    },
    "actor_rollout_ref": {
        "hybrid_engine": False,
        "model": {"use_remove_padding": True},
        "actor": {
            "strategy": "fsdp",
            "ppo_mini_batch_size": 16,
            "ppo_micro_batch_size_per_gpu": 4,
            "use_dynamic_bsz": False,
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 4},
        "rollout": {
            "name": "vllm",
            "n": 8,
            "tensor_model_parallel_size": 2,
            "data_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "calculate_log_probs": True,
            "log_prob_micro_batch_size_per_gpu": 4,
            "max_model_len": 128,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
            "enable_chunked_prefill": True,
            "free_cache_engine": True,
            "agent": {"num_workers": 1},
            "checkpoint_engine": {"backend": "nccl"},
        },
    },
}
WHOLE = {
    "async_training.staleness_threshold": 1,
    "async_training.trigger_parameter_sync_step": 1,
    "async_training.require_batches": 1,
    "async_training.admission_policy": "whole_batches",
    "data.train_batch_size": 64,
    "data.gen_batch_size": None,
}
WEIGHTS = "async_training.weights"
ALARMS = "async_training.alarms"
OF_VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
KEEP = {f"{WEIGHTS}.at_swap": "keep"}
NCCL_RELAYS = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl.multi_sender"
IN_TURNS = {"async_training.placement": "shared", "async_training.trigger_parameter_sync_step": 1}
GAE = {
    "algorithm.adv_estimator": "gae",
    "critic.strategy": "fsdp2",
    "critic.ppo_mini_batch_size": 16,
    "critic.ppo_micro_batch_size_per_gpu": 4,
}
CPU = {
    "trainer.device": "cpu",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.enable_sleep_mode": False,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "recipe_gloo",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module": "recipe.laptop.transfer.gloo_engine",
}


def configured(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `BASE` with some settings changed, by dotted path."""
    config = copy.deepcopy(dict(BASE))
    for setting, value in changes.items():
        *path, name = setting.split(".")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return config


def refused(changes: Mapping[str, Any], **facts: Any) -> dict[str, Problem]:
    """Return the problems of a changed configuration, by setting."""
    return {problem.setting: problem for problem in judge(configured(changes), **facts)[0]}


def test_a_runnable_configuration_has_no_problems() -> None:
    assert judge(configured({}), dataset_rows=500, available=Resources(accelerators=8))[0] == []
    assert judge(configured(CPU))[0] == []
    assert judge(configured(WHOLE), dataset_rows=500)[0] == []
    for prompts in (1, 64):
        assert judge(configured(WHOLE | {"data.gen_batch_size": prompts}))[0] == []
    assert judge(configured({"rollout.total_rollout_steps": 32}))[0] == []
    assert judge(configured({NCCL_RELAYS: True, f"{WEIGHTS}.publish": "inline"}))[0] == []
    assert judge(configured({"data": {"max_prompt_length": 64, "max_response_length": 64}}))[0] == []
    assert judge(configured(REWARD_MODEL), available=Resources(accelerators=10))[0] == []
    for taught in (TAUGHT, SEVERAL):
        assert judge(configured(taught), available=Resources(accelerators=10))[0] == []
        (problem,) = judge(configured(taught), available=Resources(accelerators=9))[0]
        assert "2 for teachers" in str(problem)


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
PROXIMAL = "async_training.proximal_log_probs"
SERVERS = {"model_engine_server.backend": "fsdp2"}
LATEST = {"model_engine_server.anchor": "latest"}
JUDGE = "reward.reward_model"
REWARD_MODEL = {
    f"{JUDGE}.enable": True,
    f"{JUDGE}.enable_resource_pool": True,
    f"{JUDGE}.nnodes": 1,
    f"{JUDGE}.n_gpus_per_node": 2,
    f"{JUDGE}.rollout.name": "vllm",
    f"{JUDGE}.rollout.tensor_model_parallel_size": 2,
    f"{JUDGE}.rollout.free_cache_engine": True,
}
OPD, OPD_LOSS = "distillation", "distillation.distillation_loss"
TEACHER = f"{OPD}.teacher_models.teacher_model"
TAUGHT = {
    f"{OPD}.enabled": True,
    f"{OPD}.nnodes": 1,
    f"{OPD}.n_gpus_per_node": 2,
    f"{TEACHER}.model_path": "a/teacher",
    f"{TEACHER}.inference": {"name": "vllm", "tensor_model_parallel_size": 2, "free_cache_engine": True},
}
OTHERS = {
    f"{OPD}.teacher_models.{name}": {
        "key": name,
        "model_path": f"a/{name}",
        "num_replicas": 1,
        "inference": {"name": "vllm", "tensor_model_parallel_size": 1},
    }
    for name in ("math", "code")
}
SEVERAL = TAUGHT | OTHERS | {f"{TEACHER}.model_path": None}
REFERENCE, KL = "model_engine_server.reference_replicas", "actor_rollout_ref.actor.use_kl_loss"
MEGATRON_SERVERS = {"model_engine_server.backend": "megatron"}
MEGATRON = {"model_engine": "megatron", f"{ACTOR}.strategy": "megatron"}
MODEL = "actor_rollout_ref.model"
MERGED = {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}
ADAPTERS = {f"{MODEL}.lora_rank": 8, f"{ROLLOUT}.load_format": "auto"}
RETURNED, REPLAY = f"{ROLLOUT}.enable_rollout_routing_replay", f"{ACTOR}.megatron.router_replay.mode"
R3 = MEGATRON | {RETURNED: True, REPLAY: "R3"}


def test_routers_are_replayed_in_every_placement_with_each_source_of_log_probs() -> None:
    for placed in ({}, WHOLE, IN_TURNS, KEEP):
        for source in ("bypass", "recompute", "loglinear"):
            assert refused(R3 | placed | {PROXIMAL: source}) == {}, (placed, source)
        assert refused(MEGATRON | {REPLAY: "R2", PROXIMAL: "recompute"} | placed) == {}, placed
    assert refused(MEGATRON | {REPLAY: "disabled", RETURNED: False}) == {}


def test_experts_are_divided_among_all_ranks_of_a_replica() -> None:
    sizes = {f"{ROLLOUT}.data_parallel_size": 2, f"{ROLLOUT}.expert_parallel_size": 4}
    assert refused(sizes) == refused({f"{ROLLOUT}.expert_parallel_size": 2}) == {}


def test_lora_runs_merged_or_by_adapters_alone_in_every_placement() -> None:
    for placed in ({}, WHOLE, IN_TURNS, CPU):
        assert refused(MERGED | placed) == refused(ADAPTERS | placed) == {}, placed
    assert refused(MERGED | SERVERS | {"model_engine_server.anchor": "latest"} | KEEP) == {}
    assert refused(MERGED | {f"{MODEL}.lora_adapter_path": "/adapter"}) == {}
    assert refused(MEGATRON | {f"{MODEL}.lora.rank": 8, f"{MODEL}.lora.merge": True}) == {}


@pytest.mark.parametrize(
    ("changes", "proximal"),
    [
        ({}, "recompute"),
        ({"algorithm.rollout_correction": {"bypass_mode": True}}, "bypass"),
        ({PROXIMAL: "loglinear", "algorithm.rollout_correction": {"bypass_mode": True}}, "loglinear"),
        (SERVERS | {"algorithm.rollout_correction": {"bypass_mode": True}}, "server"),
        (SERVERS | {PROXIMAL: "server"}, "server"),
    ],
)
def test_source_of_proximal_log_probs_is_asked_for_or_follows_from_the_rest(
    changes: dict[str, Any], proximal: str
) -> None:
    config = configured(changes)
    assert judge(config, dataset_rows=500)[0] == []
    assert derive(config, dataset_rows=500).proximal == proximal


def test_log_prob_servers_count_among_the_accelerators() -> None:
    problem = refused(SERVERS, available=Resources(accelerators=15))["rollout.n_gpus_per_node"]
    assert "4 trainer ranks and 4 for rollout replicas and 8 for log-prob servers" in problem.advice
    assert refused(SERVERS, available=Resources(accelerators=16)) == {}
    two_beside = SERVERS | {"model_engine_server.replicas": 4, REFERENCE: 2, KL: True}
    assert list(refused(two_beside, available=Resources(accelerators=19))) == ["rollout.n_gpus_per_node"]
    assert refused(two_beside, available=Resources(accelerators=20)) == {}


def test_log_prob_servers_of_megatron_split_the_model_over_all_their_ranks() -> None:
    assert refused(MEGATRON_SERVERS | {"model_engine_server.engine.tensor_model_parallel_size": 8}) == {}


def test_log_prob_servers_are_told_their_settings() -> None:
    given = {"anchor": "latest", "max_batch_tokens": 7, "max_delay": 0.5}
    settings, _ = read_settings(configured({"model_engine_server": given}))
    assert settings.servers.scoring == ScoringSettings(Anchor.LATEST, 7, 0.5)


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"rehearsal": "auto"}, "npu", True),
        ({"rehearsal": True}, "cpu", True),
        ({"rehearsal": False}, "cuda", False),
    ],
)
def test_run_rehearses_on_accelerators_and_where_it_is_told_to(
    given: dict[str, Any], device: str, expected: bool
) -> None:
    training, problems = read_section(AsyncTraining, given, "async_training")
    assert problems == []
    assert rehearses({"trainer": {"device": device}}, training) is expected


@pytest.mark.parametrize("value", ["maybe", "true", 1, None])
def test_what_a_rehearsal_cannot_be_is_refused_with_what_it_can(value: Any) -> None:
    _, (problem,) = read_section(AsyncTraining, {"rehearsal": value}, "async_training")
    assert "auto or true or false" in str(problem)


def test_whole_batches_are_those_of_synchronous_training() -> None:
    plan = derive(configured(WHOLE), dataset_rows=200)
    # Three epochs of 200 prompts have three batches of 64 each; the last 8 prompts of an epoch are left out.
    assert (plan.batch_groups, plan.max_staleness, plan.total_steps) == (64, 1, 9)
    assert plan.total_groups == 576
    one_mini_batch = derive(configured({**WHOLE, "data.train_batch_size": 0}), dataset_rows=200)
    assert one_mini_batch.batch_groups == 16


SAVED, START = {"trainer.save_freq": 2}, {"async_training.start_from": "/b/global_step_4"}
SAVE = f"{ACTOR}.checkpoint.save_contents"


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.save_freq": -1, f"{ACTOR}.checkpoint": {"save_contents": ["hf_model"]}},
        SAVED | {"trainer.resume_mode": "disable", f"{ACTOR}.checkpoint": {"save_contents": ["hf_model"]}},
        SAVED | {f"{ACTOR}.checkpoint": {"save_contents": ["hf_model", "extra", "optimizer", "model"]}},
        SAVED | MEGATRON | {f"{ACTOR}.checkpoint": {"save_contents": ["hf_model", "optimizer", "extra"]}},
        SAVED | {f"{ACTOR}.checkpoint": {"save_contents": None}},
        SAVED | START,
    ],
)
def test_checkpoints_that_no_run_has_to_resume_from_may_have_what_the_user_wants(changes: dict[str, Any]) -> None:
    found = judge(configured(changes), available=Resources(accelerators=8))[0]
    assert not [problem for problem in found if "checkpoint" in problem.setting or "start_from" in problem.setting]


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({f"{ROLLOUT}.n": 0, "rollout.n": 0}, f"{ROLLOUT}.n", "an integer >= 1"),
        ({f"{ROLLOUT}.n": 1, "rollout.n": 1}, f"{ROLLOUT}.n", "an integer >= 2"),
        ({"rollout.n": 4}, "rollout.n", f"Set {ROLLOUT}.n only"),
        ({f"{ACTOR}.ppo_mini_batch_size": 0}, f"{ACTOR}.ppo_mini_batch_size", "an integer >= 1"),
        ({f"{ACTOR}.ppo_mini_batch_size": 16.5}, f"{ACTOR}.ppo_mini_batch_size", "an integer >= 1"),
        ({"data.train_batch_size": 64}, "data.train_batch_size", "ppo_mini_batch_size"),
        ({"data.gen_batch_size": 4}, "data.gen_batch_size", "one by one"),
        ({**WHOLE, "data.gen_batch_size": 4}, "data.gen_batch_size", "one by one"),
        ({**WHOLE, "data.train_batch_size": 40}, "data.train_batch_size", "a multiple of 16"),
        (
            {**WHOLE, "async_training.require_batches": 2},
            "async_training.require_batches",
            "the batch of a step already",
        ),
        ({**WHOLE, "async_training.max_staleness": 2}, "async_training.max_staleness", "0 or 1 with whole batches"),
        (
            {**WHOLE, "async_training.staleness_threshold": 0.5, "async_training.max_staleness": 1},
            "async_training.staleness_threshold",
            "1, the bound",
        ),
        (
            {**WHOLE, "async_training.trigger_parameter_sync_step": 2},
            "async_training.trigger_parameter_sync_step",
            "1 with whole batches",
        ),
        (
            {**WHOLE, "async_training.partial_rollout": True},
            "async_training.partial_rollout",
            "false with whole batches",
        ),
        ({"rollout.total_rollout_steps": 31}, "rollout.total_rollout_steps", "one batch of 32 prompts"),
        ({"rollout.total_rollout_steps": -1}, "rollout.total_rollout_steps", "an integer >= 1"),
        ({"trainer.total_training_steps": 0}, "trainer.total_training_steps", "or null"),
        ({"trainer.total_epochs": None}, "trainer.total_epochs", "an integer >= 1"),
        ({"trainer.save_freq": -2}, "trainer.save_freq", "-1 for never"),
        ({"trainer.default_local_dir": ""}, "trainer.default_local_dir", "a name"),
        ({"trainer.save_freq": 1.5}, "trainer.save_freq", "weight versions"),
        ({"trainer.test_freq": "often"}, "trainer.test_freq", "-1 for never"),
        ({"async_training.staleness_threshold": -0.5}, "async_training.staleness_threshold", "a number >= 0"),
        ({"async_training.staleness_threshold": float("nan")}, "async_training.staleness_threshold", "a number >= 0"),
        ({"async_training.staleness_threshold": float("inf")}, "async_training.staleness_threshold", "a number >= 0"),
        ({"async_training.timeouts.reward": float("inf")}, "async_training.timeouts.reward", "a number > 0"),
        ({f"{ACTOR}.checkpoint": {"async_save": True}}, f"{ACTOR}.checkpoint.async_save", "when all of it is written"),
        (SAVED | {f"{ACTOR}.checkpoint": {"save_contents": ["hf_model"]}}, SAVE, "model, optimizer, extra where a run"),
        (SAVED | {f"{ACTOR}.checkpoint": {"save_contents": ["model", "extra"]}}, SAVE, "go on without optimizer"),
        (SAVED | {f"{ACTOR}.checkpoint": {"save_contents": ["optimizer", "extra"]}}, SAVE, "resume_mode=disable"),
        (SAVED | {f"{ACTOR}.checkpoint": {"save_contents": []}}, SAVE, "without model and optimizer and extra"),
        (
            SAVED | {f"{ACTOR}.checkpoint": {"load_contents": ["hf_model"]}},
            f"{ACTOR}.checkpoint.load_contents",
            "model",
        ),
        (SAVED | GAE | {"critic.checkpoint": {"save_contents": ["model"]}}, "critic.checkpoint.save_contents", "extra"),
        (
            {f"{ACTOR}.checkpoint": {"save_contents": ["hf"]}},
            SAVE,
            "a list of some of model, optimizer, extra, hf_model",
        ),
        ({f"{ACTOR}.checkpoint": {"save_contents": "model"}}, SAVE, "a list of names"),
        (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/a/global_step_2"} | START,
            "async_training.start_from",
            "starts with the weights of one",
        ),
        ({"trainer.resume_mode": "always"}, "trainer.resume_mode", "auto, disable, resume_path"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path", "global_step_N"),
        ({"trainer.default_hdfs_dir": "hdfs://x"}, "trainer.default_hdfs_dir", "resume_mode=disable"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": -1}, f"{ROLLOUT}.tensor_model_parallel_size", "an integer >= 1"),
        (
            {f"{ROLLOUT}.tensor_model_parallel_size": 0, "rollout.n_gpus_per_node": 3},
            f"{ROLLOUT}.tensor_model_parallel_size",
            "an integer >= 1",
        ),
        ({f"{ROLLOUT}.full_determinism": 3}, f"{ROLLOUT}.full_determinism", "true or false"),
        ({"data.train_batch_size": "x"}, "data.train_batch_size", "an integer >= 0"),
        ({"data.gen_batch_size": "x"}, "data.gen_batch_size", "an integer >= 0, or null"),
        ({"data.train_files": ["a.parquet", 3.5]}, "data.train_files", "a path or name, or a list of them"),
        ({"data": {"max_prompt_length": 64}}, "data.max_response_length", "an integer >= 1"),
        ({"data.train_files": 3.5}, "data.train_files", "a path or name, or a list of them"),
        ({"ray_kwargs": 3}, "ray_kwargs", "a section of settings"),
        ({"async_training.trigger_parameter_sync_step": 0}, "async_training.trigger_parameter_sync_step", ">= 1"),
        ({"async_training.require_batches": 0}, "async_training.require_batches", ">= 1"),
        ({"async_training.require_batches": True}, "async_training.require_batches", "an integer"),
        ({"async_training.on_non_finite": "skip"}, "async_training.on_non_finite", "fail or drop"),
        ({"async_training.timeouts.weight_sync": 0}, "async_training.timeouts.weight_sync", "a number > 0"),
        ({"async_training.timeouts": 5}, "async_training.timeouts", "a section"),
        ({"async_training.stalenes_threshold": 1}, "async_training.stalenes_threshold", "staleness_threshold?"),
        ({"async_training.timeouts.weightsync": 1}, "async_training.timeouts.weightsync", "timeouts.weight_sync?"),
        ({f"{ROLLOUT}.name": ["vllm"]}, f"{ROLLOUT}.name", "allowed is vllm"),
        ({"rollout.zzz": 1}, "rollout.zzz", "Remove it"),
        ({"rollout": {"": None}}, "rollout.''", "Remove it"),
        ({"builtin_task": {"lengths": "long_tail"}}, "data.max_response_length", "preset=tiny_cpu_long_tail"),
        ({"builtin_task": {"family": "gpt2"}}, "builtin_task.family", "no setting any more. The task's model is"),
        ({"async_training.pipeline_depth": 4.5}, "async_training.pipeline_depth", "Set async_training.staleness_thr"),
        (
            {"async_training.staleness_threshold": 4.5, "async_training.max_staleness": 4},
            "async_training.staleness_threshold",
            "async_training.max_staleness=5",
        ),
        (
            {"async_training.max_staleness": 1, "async_training.staleness_threshold": 2.5},
            "async_training.staleness_threshold",
            "async_training.max_staleness=3",
        ),
        ({"async_training.max_staleness": 0}, "async_training.staleness_threshold", "the bound of 0 versions"),
        (
            {
                "async_training.placement": "elastic",
                "trainer.n_gpus_per_node": 6,
                "trainer.nnodes": 2,
                "actor_rollout_ref.actor.ppo_mini_batch_size": 48,
                "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
                "rollout.n_gpus_per_node": 4,
            },
            "trainer.n_gpus_per_node",
            "a multiple or a divisor of a replica's 4 accelerators",
        ),
        (
            {
                "async_training.placement": "elastic",
                "async_training.admission_policy": "whole_batches",
                "async_training.max_staleness": 1,
                "async_training.staleness_threshold": 1,
                "async_training.trigger_parameter_sync_step": 1,
            },
            "async_training.admission_policy",
            "another one with placement=elastic",
        ),
        ({"algorithm.adv_estimator": "gae", "critic.enable": False}, "critic.enable", "true or null"),
        ({**GAE, "critic.strategy": "megatron"}, "critic.strategy", "model_engine=dp"),
        ({**GAE, "critic.ppo_mini_batch_size": 12}, "critic.ppo_mini_batch_size", "a divisor of the batch of 32"),
        ({**GAE, "critic.ppo_micro_batch_size_per_gpu": None}, "critic.ppo_micro_batch_size_per_gpu", "dynamic_bsz"),
        ({**GAE, "critic.checkpoint.async_save": True}, "critic.checkpoint.async_save", "false"),
        ({f"{MODEL}.lora_rank": 8}, f"{ROLLOUT}.load_format", "auto or safetensors"),
        (KEEP | ADAPTERS, f"{WEIGHTS}.at_swap", "interrupt or drain"),
        (SERVERS | ADAPTERS, "model_engine_server.backend", "whole weights"),
        (ADAPTERS | {f"{MODEL}.lora_adapter_path": "/adapter"}, f"{MODEL}.lora_adapter_path", "lora.merge=true"),
        (ADAPTERS | {f"{MODEL}.target_parameters": ["experts.down_proj"]}, f"{MODEL}.target_parameters", "null"),
        # Router replay and expert parallelism.
        ({RETURNED: True}, RETURNED, f"false with {ACTOR}.strategy=fsdp"),
        (MEGATRON | {RETURNED: True}, REPLAY, f"R3 with {RETURNED}=true"),
        (MEGATRON | {RETURNED: True, REPLAY: "R2"}, REPLAY, f"R3 with {RETURNED}=true"),
        (MEGATRON | {REPLAY: "R3"}, RETURNED, f"true with {REPLAY}=R3"),
        (
            {"model_engine": "veomni", f"{ACTOR}.strategy": "veomni", f"{ACTOR}.veomni.router_replay.mode": "R3"},
            RETURNED,
            f"true with {ACTOR}.veomni.router_replay.mode=R3",
        ),
        (
            MEGATRON | {REPLAY: "R2", "async_training.proximal_log_probs": "bypass"},
            REPLAY,
            "disabled or R3 with async_training.proximal_log_probs=bypass",
        ),
        (R3 | MEGATRON_SERVERS, "model_engine_server.backend", f"disabled with {REPLAY}=R3"),
        (MEGATRON | MEGATRON_SERVERS | {REPLAY: "R2"}, "model_engine_server.backend", f"disabled with {REPLAY}=R2"),
        (R3 | {f"{MODEL}.use_remove_padding": False}, f"{MODEL}.use_remove_padding", f"true with {REPLAY}=R3"),
        (R3 | {f"{ACTOR}.megatron.pad_to_length": True}, f"{ACTOR}.megatron.pad_to_length", f"false with {REPLAY}=R3"),
        *(
            (R3 | {f"{ROLLOUT}.engine_kwargs.vllm": {name: size}}, f"{ROLLOUT}.engine_kwargs.vllm.{name}", allowed)
            for name, size, allowed in (
                ("decode_context_parallel_size", 2, f"1 with {RETURNED}=true"),
                ("pipeline_parallel_size", 2, f"1 with {RETURNED}=true"),
                ("kv_transfer_config", {"kv_connector": "Mine"}, f"null with {RETURNED}=true"),
            )
        ),
        ({f"{ROLLOUT}.expert_parallel_size": 4}, f"{ROLLOUT}.expert_parallel_size", "1, or 2 x 1"),
        (
            REWARD_MODEL | {f"{JUDGE}.rollout.expert_parallel_size": 4},
            f"{JUDGE}.rollout.expert_parallel_size",
            "1, or 2 x 1",
        ),
        (
            MEGATRON | {f"{ACTOR}.megatron.expert_model_parallel_size": 0},
            f"{ACTOR}.megatron.expert_model_parallel_size",
            "an integer >= 1",
        ),
        ({f"{MODEL}.lora_adapter_path": "/adapter"}, f"{MODEL}.lora_rank", "trains the whole model"),
        ({f"{MODEL}.lora.rank": 8}, f"{MODEL}.lora.rank", "set actor_rollout_ref.model.lora_rank"),
        (MEGATRON | {f"{MODEL}.lora_rank": 8}, f"{MODEL}.lora_rank", "set actor_rollout_ref.model.lora.rank"),
        (MEGATRON | {f"{MODEL}.lora.rank": 8}, f"{MODEL}.lora.merge", "the frozen base"),
        *(
            (
                {f"{ALARMS}.{name}": 0},
                f"{ALARMS}.{name}",
                "0, or null" if name == "failed_groups" else "1, or null",
            )
            for name in sorted({watched.setting for watched in WATCHED.values()})
        ),
        ({f"{ALARMS}.exit_status": 4}, f"{ALARMS}.exit_status", "true or false"),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 2, "actor_rollout_ref.model.use_remove_padding": False},
            f"{ACTOR}.ulysses_sequence_parallel_size",
            "use_remove_padding=True",
        ),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{MODEL}.override_config": {"attn_implementation": "sdpa"}},
            f"{ACTOR}.ulysses_sequence_parallel_size",
            "1 with actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        ),
        (
            {
                **SERVERS,
                "model_engine_server.engine": {"ulysses_sequence_parallel_size": 2},
                f"{MODEL}.override_config": {"model_config": {"attn_implementation": "eager"}},
            },
            "model_engine_server.engine.ulysses_sequence_parallel_size",
            "attn_implementation=eager",
        ),
        (
            {
                **GAE,
                "critic.ulysses_sequence_parallel_size": 2,
                "critic.model": {"use_remove_padding": True, "override_config": {"attn_implementation": "sdpa"}},
            },
            "critic.ulysses_sequence_parallel_size",
            "1 with critic.model.override_config.attn_implementation=sdpa",
        ),
        (
            {**CPU, f"{ACTOR}.ulysses_sequence_parallel_size": 2},
            f"{ACTOR}.ulysses_sequence_parallel_size",
            "1 where trainer.device=cpu",
        ),
        ({**GAE, **CPU, "critic.strategy": "fsdp"}, "critic.strategy", "fsdp2 where trainer.device=cpu"),
        ({"algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator", "greedy"),
        ({"algorithm.filter_groups": {"enable": True, "metric": None}}, "algorithm.filter_groups.metric", "a name"),
        (
            {
                "algorithm.filter_groups": {"enable": True, "metric": "acc"},
                "algorithm.adv_estimator": "gpg",
                f"{ROLLOUT}.n": 1,
                "rollout.n": None,
            },
            "algorithm.filter_groups.enable",
            "false with",
        ),
        (
            {**REWARD_MODEL, f"{JUDGE}.enable_resource_pool": False, f"{JUDGE}.n_gpus_per_node": 3},
            f"{JUDGE}.enable_resource_pool",
            "accelerators of its own",
        ),
        ({**REWARD_MODEL, f"{JUDGE}.nnodes": 0, f"{JUDGE}.n_gpus_per_node": 3}, f"{JUDGE}.nnodes", ">= 1"),
        ({**REWARD_MODEL, f"{JUDGE}.nnodes": 3, f"{JUDGE}.n_gpus_per_node": 0}, f"{JUDGE}.n_gpus_per_node", ">= 1"),
        ({**REWARD_MODEL, f"{JUDGE}.rollout.name": "sglang"}, f"{JUDGE}.rollout.name", "vllm"),
        ({**TAUGHT, f"{OPD}.nnodes": 0}, f"{OPD}.nnodes", ">= 1"),
        ({**TAUGHT, f"{OPD}.n_gpus_per_node": 3}, f"{OPD}.n_gpus_per_node", "such that 3 divides by 2"),
        ({**TAUGHT, f"{TEACHER}.model_path": None}, f"{TEACHER}.model_path", "a value"),
        (
            {**TAUGHT, f"{TEACHER}.inference": {"name": "sglang", "tensor_model_parallel_size": 2}},
            f"{TEACHER}.inference.name",
            "vllm",
        ),
        (
            {**TAUGHT, f"{TEACHER}.inference": {"name": "vllm", "router_config_path": "r.yaml"}},
            f"{TEACHER}.inference.router_config_path",
            "null",
        ),
        ({**SEVERAL, f"{OPD}.n_gpus_per_node": 4}, f"{OPD}.n_gpus_per_node", "take 2"),
        ({**SEVERAL, f"{TEACHER}.model_path": "a/teacher"}, f"{TEACHER}.model_path", "null beside other teachers"),
        (
            {**TAUGHT, f"{TEACHER}.inference": {"name": "vllm", "tensor_model_parallel_size": 2, "max_model_len": 128}},
            f"{TEACHER}.inference.max_model_len",
            "at least 129",
        ),
        (
            {**SEVERAL, f"{OPD}.teacher_models.code": OTHERS[f"{OPD}.teacher_models.code"] | {"key": None}},
            f"{OPD}.teacher_models.code.key",
            "a value",
        ),
        (
            {**TAUGHT, PROXIMAL: "loglinear", f"{OPD_LOSS}.use_policy_gradient": True},
            f"{OPD_LOSS}.use_policy_gradient",
            "false with",
        ),
        (
            {**TAUGHT, **CPU, f"{TEACHER}.inference": {"name": "vllm", "enable_sleep_mode": False}},
            f"{TEACHER}.inference.free_cache_engine",
            "cpu",
        ),
        (
            {**REWARD_MODEL, f"{JUDGE}.rollout.tensor_model_parallel_size": 4},
            f"{JUDGE}.rollout.tensor_model_parallel_size",
            "The accelerators are the 2",
        ),
        (
            {**REWARD_MODEL, **CPU, f"{JUDGE}.rollout.enable_sleep_mode": False},
            f"{JUDGE}.rollout.free_cache_engine",
            "no sleep mode",
        ),
        ({f"{ROLLOUT}.name": "???"}, f"{ROLLOUT}.name", "vllm"),
        ({f"{ROLLOUT}.calculate_log_probs": False}, f"{ROLLOUT}.calculate_log_probs", "true"),
        ({f"{ROLLOUT}.full_determinism": True}, f"{ROLLOUT}.full_determinism", "same seed"),
        *(
            ({f"{OF_VLLM}.{name}": value}, f"{OF_VLLM}.{name}", words)
            for name, value, words in (
                ("scheduler_cls", "x.Y", "interrupted answers"),
                ("seed", 1, f"Set {ROLLOUT}.seed"),
                ("max_num_seqs", 4, f"Set {ROLLOUT}.max_num_seqs"),
                ("logprobs_mode", "raw_logprobs", f"Set {ROLLOUT}.logprobs_mode"),
                ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}, "never tried"),
                ("data_parallel_backend", "ray", "mp"),
                ("stream_interval", 8, "1"),
                ("enable_eplb", True, "format of the model's files"),
                ("cpu_offload_gb", 4, "0"),
                ("kv_transfer_config.kv_role", "kv_producer", "null or kv_both"),
            )
        ),
        ({"data.max_prompt_length": 0, f"{ROLLOUT}.max_model_len": 64}, "data.max_prompt_length", ">= 1"),
        ({"data.max_response_length": 0, f"{ROLLOUT}.max_model_len": 64}, "data.max_response_length", ">= 1"),
        ({f"{ROLLOUT}.max_model_len": 127}, f"{ROLLOUT}.max_model_len", "together, 128"),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "naive"}, f"{ROLLOUT}.checkpoint_engine.backend", "backend=nccl"),
        ({f"{ROLLOUT}.quantization": "fp8"}, f"{ROLLOUT}.quantization", "staging=none"),
        ({f"{WEIGHTS}.staging": "disk"}, f"{WEIGHTS}.staging", "device or host or none"),
        ({f"{WEIGHTS}.publish": "later"}, f"{WEIGHTS}.publish", "beside or inline, or null"),
        (IN_TURNS | {f"{WEIGHTS}.publish": "beside"}, f"{WEIGHTS}.publish", "inline with placement=shared"),
        ({f"{WEIGHTS}.encoding": "delta"}, f"{WEIGHTS}.encoding", "always sent whole"),
        ({NCCL_RELAYS: True}, NCCL_RELAYS, "false where weights are published beside training"),
        ({NCCL_RELAYS: True, f"{WEIGHTS}.publish": "beside"}, NCCL_RELAYS, "set async_training.weights.publish=inline"),
        (SERVERS | LATEST | {f"{WEIGHTS}.publish": "beside"}, f"{WEIGHTS}.publish", "remove the setting"),
        ({f"{WEIGHTS}.at_swap": "wait"}, f"{WEIGHTS}.at_swap", "drain or interrupt or keep, or null"),
        (KEEP | {f"{WEIGHTS}.staging": "none"}, f"{WEIGHTS}.staging", "loaded in place"),
        (KEEP | {f"{OF_VLLM}.kv_transfer_config": {"kv_connector": "x"}}, f"{OF_VLLM}.kv_transfer_config", "remove it"),
        (KEEP | {f"{OF_VLLM}.kv_offloading_size": 8}, f"{OF_VLLM}.kv_offloading_size", "remove it"),
        (KEEP | WHOLE, f"{WEIGHTS}.at_swap", "drain with whole batches"),
        (KEEP | IN_TURNS, f"{WEIGHTS}.at_swap", "interrupt with placement=shared"),
        ({f"{ROLLOUT}.agent.num_workers": 0}, f"{ROLLOUT}.agent.num_workers", ">= 1"),
        ({"actor_rollout_ref.hybrid_engine": True}, "actor_rollout_ref.hybrid_engine", "false"),
        ({"model_engine": "megatron"}, f"{ACTOR}.strategy", "model_engine=megatron"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "dynamic_bsz"),
        ({f"{ACTOR}.ppo_micro_batch_size": 4}, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "remove ppo_micro_batch_size"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 64}, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "a divisor of 32, "),
        ({"trainer.n_gpus_per_node": 3}, f"{ACTOR}.ppo_mini_batch_size", "divide by 3 data-parallel ranks"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 3}, "trainer.n_gpus_per_node", "a multiple of the model's 3"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, "rollout.n_gpus_per_node", "divides by 3"),
        (IN_TURNS | {f"{ROLLOUT}.tensor_model_parallel_size": 3}, "trainer.n_gpus_per_node", "divides by 3"),
        (CPU | {f"{ACTOR}.strategy": "fsdp"}, f"{ACTOR}.strategy", "strategy=fsdp2"),
        (CPU | {f"{ROLLOUT}.free_cache_engine": True}, f"{ROLLOUT}.free_cache_engine", "no sleep mode"),
        (CPU | {f"{ROLLOUT}.enable_sleep_mode": True}, f"{ROLLOUT}.enable_sleep_mode", "no sleep mode"),
        (CPU | {f"{ROLLOUT}.max_num_batched_tokens": 1024}, f"{ROLLOUT}.max_num_batched_tokens", "max_model_len, 2048"),
        ({f"{ROLLOUT}.max_num_seqs": 2049}, f"{ROLLOUT}.max_num_batched_tokens", "at least max_num_seqs, 2049"),
        (
            {**REWARD_MODEL, f"{JUDGE}.rollout.max_num_seqs": 9, f"{JUDGE}.rollout.max_num_batched_tokens": 8},
            f"{JUDGE}.rollout.max_num_batched_tokens",
            "at least max_num_seqs, 9",
        ),
        ({PROXIMAL: "server"}, PROXIMAL, "add model_engine_server=fsdp2"),
        ({PROXIMAL: "recalculate"}, PROXIMAL, "bypass or recompute or server or loglinear"),
        (SERVERS | {PROXIMAL: "bypass"}, PROXIMAL, "set model_engine_server=disabled"),
        (
            {PROXIMAL: "loglinear", f"{ACTOR}.policy_loss.loss_mode": "gspo"},
            f"{ACTOR}.policy_loss.loss_mode",
            "vanilla with async_training.proximal_log_probs=loglinear",
        ),
        (SERVERS | {"model_engine_server.backend": "fsdp"}, "model_engine_server.backend", "fsdp2 or megatron"),
        (SERVERS | KEEP, "model_engine_server.anchor", "latest with async_training.weights.at_swap=keep"),
        (SERVERS | {"model_engine_server.anchor": "newest"}, "model_engine_server.anchor", "generation or latest"),
        (SERVERS | {"model_engine_server.replicas": 3}, "model_engine_server.replicas", "a divisor of 8"),
        ({REFERENCE: 1, KL: True}, REFERENCE, "0 without log-prob servers"),
        (SERVERS | {REFERENCE: 1}, REFERENCE, "set actor_rollout_ref.actor.use_kl_loss"),
        (
            SERVERS | {REFERENCE: 1, KL: True, "actor_rollout_ref.model": {"lora_rank": 8, "lora": {"merge": True}}},
            REFERENCE,
            "0 with LoRA",
        ),
        (
            MEGATRON
            | SERVERS
            | {REFERENCE: 1, KL: True, "actor_rollout_ref.model": {"lora": {"rank": 8, "merge": True}}},
            REFERENCE,
            "0 with LoRA",
        ),
        (
            SERVERS
            | {
                "model_engine_server.n_gpus_per_node": 3,
                "model_engine_server.nnodes": 4,
                "model_engine_server.replicas": 3,
            },
            "model_engine_server.replicas",
            "fill whole nodes of 3",
        ),
        (SERVERS | {"model_engine_server.max_batch_token": 1}, "model_engine_server.max_batch_token", "_tokens?"),
        (
            MEGATRON_SERVERS | {"model_engine_server.engine.tensor_model_parallel_size": 3},
            "model_engine_server.engine.tensor_model_parallel_size",
            "divides a server's 8 ranks",
        ),
        (CPU | MEGATRON_SERVERS, "model_engine_server.backend", "take model_engine_server=fsdp2"),
        (
            CPU | {f"{ROLLOUT}.checkpoint_engine.backend": "nccl"},
            f"{ROLLOUT}.checkpoint_engine.backend",
            "recipe_gloo",
        ),
        (
            CPU | {f"{ROLLOUT}.checkpoint_engine.custom_backend_module": "recipe.async_engine.weights.nccl_engine"},
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module",
            "recipe.laptop.transfer.gloo_engine",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(changes: dict[str, Any], setting: str, words: str) -> None:
    config = configured(changes)
    problems = judge(config)[0]
    assert config == configured(changes), "it is left as it is"
    assert [problem.setting for problem in problems] == [setting]
    assert words in str(problems[0])


def test_a_batch_larger_than_the_data_is_refused() -> None:
    problems = refused({}, dataset_rows=31)
    assert "at most 31 prompts, the rows of data.train_files" in str(problems[f"{ACTOR}.ppo_mini_batch_size"])
    assert refused({}, dataset_rows=32) == {}


def test_rows_are_counted_over_all_training_files() -> None:
    files = [FileFact("data.train_files", name, "data", rows=15) for name in ("a", "b")]
    assert refused({}, files=[*files, FileFact("data.train_files", "of unknown length", "data")]) == {}
    files.append(FileFact("data.val_files", "v", "data", rows=2))
    assert list(refused({}, files=files)) == [f"{ACTOR}.ppo_mini_batch_size"]
    files.append(FileFact("data.train_files", "c", "data", rows=2))
    for all_of_them in (0, -1, None):
        assert refused({"data.train_max_samples": all_of_them}, files=files) == {}
    problem = refused({"data.train_max_samples": 1}, files=files)[f"{ACTOR}.ppo_mini_batch_size"]
    assert "at most 1 prompts" in str(problem)


@pytest.mark.parametrize(("given_in", "least"), [("fp32", 4), ("float32", 4), ("bf16", 2)])
def test_tensor_goes_whole_through_the_bucket_on_a_cpu(given_in: str, least: int) -> None:
    files = [FileFact("actor_rollout_ref.model.path", "m", "model", largest_tensor=("embedding", 1 << 20))]
    setting = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    given = CPU | {f"{ACTOR}.fsdp_config.model_dtype": given_in}
    assert refused(given | {setting: least}, files=files) == {}
    assert f"Set {setting}={least}." in str(refused(given | {setting: least - 1}, files=files)[setting])


def test_more_workers_than_resources_are_refused() -> None:
    problem = refused({}, available=Resources(accelerators=7))["rollout.n_gpus_per_node"]
    assert "4 trainer ranks and 4 for rollout replicas" in problem.advice
    on_cpu = refused(CPU, available=Resources(accelerators=7))["rollout.n_gpus_per_node"]
    assert "ray_kwargs.ray_init.num_gpus" in on_cpu.advice


def test_files_that_cannot_be_used_are_refused_under_the_setting_that_names_them() -> None:
    files = [
        FileFact("actor_rollout_ref.model.path", "/nowhere", "model", fault="does not exist"),
        FileFact("data.val_files", "/v.parquet", "data", columns=("question", "reward_model", "data_source")),
    ]
    problems = refused({}, files=files)
    assert "It does not exist" in str(problems["actor_rollout_ref.model.path"])
    assert "It has no prompt; its columns are question" in str(problems["data.val_files"])


def test_reward_model_that_is_off_needs_no_accelerators() -> None:
    assert list(refused(REWARD_MODEL, available=Resources(accelerators=9))) == ["rollout.n_gpus_per_node"]
    assert refused(REWARD_MODEL | {f"{JUDGE}.enable": False}, available=Resources(accelerators=8)) == {}


def test_reward_model_without_a_parallel_size_takes_any_number_of_accelerators() -> None:
    absent = {f"{JUDGE}.rollout": {"name": "vllm", "free_cache_engine": True}, f"{JUDGE}.n_gpus_per_node": 3}
    assert refused(REWARD_MODEL | absent) == {}


def test_all_problems_are_reported_in_one_error_that_survives_pickling() -> None:
    changes = {f"{ROLLOUT}.n": 0, "rollout.n": 0, "async_training.on_non_finite": "skip", "critic.enable": 3}
    error = ConfigError(judge(configured(changes))[0])
    assert str(error).startswith("The configuration has 3 problems:")
    assert all(setting in str(error) for setting in (f"{ROLLOUT}.n=0", "on_non_finite=skip", "critic.enable=3"))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(ConfigError(error.problems[:1])).startswith("The configuration has 1 problem:")


@pytest.mark.parametrize(
    ("given", "bound", "depth"),
    [
        ({"staleness_threshold": 0}, 0, 0.0),
        ({"staleness_threshold": 0.1}, 4, 0.1),
        ({"staleness_threshold": 1.0}, 4, 1.0),
        ({"staleness_threshold": 2.1}, 4, 2.1),
        ({"staleness_threshold": 4.5}, 5, 4.5),
        ({"staleness_threshold": 0.5, "max_staleness": 4}, 4, 0.5),
        ({"staleness_threshold": 3.5, "max_staleness": 4}, 4, 3.5),
    ],
)
def test_the_bound_and_the_depth_follow_from_the_threshold(given: dict[str, Any], bound: int, depth: float) -> None:
    config = configured({"async_training": given})
    plan = derive(config)
    assert (plan.max_staleness, plan.pipeline_depth) == (bound, depth)
    assert judge(config)[0] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"staleness_threshold": 1, "max_staleness": 1}, ["max_staleness=1 .* longer than 1 version. 3 lets"]),
        ({"staleness_threshold": 1.5, "max_staleness": 2}, ["max_staleness=2 .* longer than 2 versions. 4 lets"]),
        ({"staleness_threshold": 0.5, "max_staleness": 2}, []),
        ({"staleness_threshold": 1}, []),
        ({"staleness_threshold": 0}, []),
        ({"staleness_threshold": 1, "max_staleness": 1, "admission_policy": "whole_batches"}, []),
    ],
)
def test_a_bound_as_tight_as_the_depth_says_what_it_costs(given: dict[str, Any], said: list[str]) -> None:
    _, context = judge(configured({"async_training": given}), None, ())
    found = list(tight_bound(context))
    assert len(found) == len(said)
    assert all(re.search(pattern, text) for pattern, text in zip(said, found, strict=True))


def test_a_plan_has_the_amounts_of_the_run() -> None:
    plan = derive(configured({}), dataset_rows=500)
    assert (plan.batch_groups, plan.batches_per_version) == (32, 2)
    assert (plan.trainer_ranks, plan.rollout_replicas, plan.answers_per_group) == (4, 2, 8)
    # Two replicas have sixteen groups of eight answers each, and their engines have 16 places.
    assert (plan.max_concurrent_trajectories, plan.engine_places) == (256, 32)
    assert (plan.total_steps, plan.total_groups) == (31, 1000)
    # A replica has a quarter more answers than its engine has places, and never fewer than those of a group.
    filled = derive(configured({"async_training.concurrent_samples_per_replica": None}))
    assert (filled.max_concurrent_trajectories, filled.engine_places) == (40, 32)
    one_group = derive(
        configured({"async_training.concurrent_samples_per_replica": None, f"{ROLLOUT}.max_num_seqs": 4})
    )
    assert (one_group.max_concurrent_trajectories, one_group.engine_places) == (16, 8)
    by_default = derive(configured({ROLLOUT: {"n": 8}}))
    assert (by_default.rollout_replicas, by_default.engine_places) == (4, by_default.max_concurrent_trajectories)
    in_turns = derive(configured(IN_TURNS | {"trainer.nnodes": 3, "rollout.n_gpus_per_node": 64}))
    assert (in_turns.trainer_ranks, in_turns.rollout_replicas) == (12, 6)


@pytest.mark.parametrize(
    ("changes", "rows", "steps"),
    [
        ({}, None, 1000 // 32),
        ({}, 100, 3 * 100 // 32),
        ({"trainer.total_training_steps": 7}, 100, 7),
        ({"rollout.total_rollout_steps": None}, 100, 3 * 100 // 32),
        ({"rollout.total_rollout_steps": 64}, 100, 2),
    ],
)
def test_the_first_limit_ends_the_run(changes: dict[str, Any], rows: int | None, steps: int) -> None:
    assert derive(configured(changes), dataset_rows=rows).total_steps == steps


def test_a_run_without_any_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.total_training_steps=null"):
        derive(configured({"rollout.total_rollout_steps": None, "trainer.total_epochs": None}))


def test_epochs_of_a_data_set_that_only_the_run_can_make_are_a_limit_that_is_not_known_yet() -> None:
    assert derive(configured({"rollout.total_rollout_steps": None})).total_steps == 0


def test_a_plan_is_not_derived_from_faulty_settings() -> None:
    with pytest.raises(ConfigError, match="on_non_finite"):
        derive(configured({"async_training.on_non_finite": "skip"}))


def test_a_setting_with_a_problem_keeps_its_default_so_that_others_are_still_read() -> None:
    section, problems = read_section(AsyncTraining, {"require_batches": 0, "max_group_retries": 5}, "async_training")
    assert [problem.setting for problem in problems] == ["async_training.require_batches"]
    assert (section.require_batches, section.max_group_retries) == (1, 5)


def test_integers_are_read_as_numbers_where_a_number_is_meant() -> None:
    settings, problems = read_settings(configured({"async_training.timeouts": {"trajectory": 5}}))
    assert problems == []
    assert settings.async_training.timeouts.trajectory == 5.0
    assert isinstance(settings.async_training.timeouts.trajectory, float)


def test_the_documentation_has_every_setting() -> None:
    document = render_document()
    for path, cls in SECTIONS.items():
        for name in cls.__dataclass_fields__:
            # The documentation has all alarms in one row.
            assert (f"`{name}" if cls is Alarms else f"`{path}.{name}") in document


def test_the_committed_documentation_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert write_documentation(["--check", str(CHECKOUT / "docs" / "configuration.md")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "beside"),
        (SERVERS, "beside"),
        (SERVERS | LATEST, "inline"),
        (LATEST, "beside"),
        (IN_TURNS, "inline"),
        ({f"{WEIGHTS}.publish": "inline"}, "inline"),
    ],
)
def test_versions_travel_beside_training_where_nothing_that_trains_next_needs_them(
    changes: dict[str, Any], expected: str
) -> None:
    assert read_settings(configured(changes))[0].weights.publish == expected


def test_stocks_lending_means_the_elastic_placement() -> None:
    for placement, meant in (("separate", "elastic"), ("shared", "shared"), ("elastic", "elastic")):
        changes = {"async_training.use_dynamic_resource_scheduling": True, "async_training.placement": placement}
        settings, problems = read_settings(configured(changes))
        assert not problems and settings.async_training.placement == meant


@pytest.mark.parametrize("placement", ["separate", "elastic"])
def test_without_nodes_of_its_own_generation_shares_the_trainers(placement: str) -> None:
    changes = {"rollout.nnodes": 0, "async_training.placement": placement}
    settings, problems = read_settings(configured(changes))
    assert not problems and settings.async_training.placement == "shared"
    (refused,) = judge(configured(changes | {"async_training.trigger_parameter_sync_step": 4}))[0]
    assert refused.setting == "async_training.trigger_parameter_sync_step" and "set it to 1" in refused.advice


def test_a_free_place_on_lent_accelerators_goes_to_any_groups_answer() -> None:
    elastic = {"async_training.placement": "elastic"}
    for changes, policy in (
        (elastic, "turns"),
        (elastic | {f"{WEIGHTS}.at_swap": "drain"}, "oldest_ready"),
        ({}, "oldest_ready"),
    ):
        assert read_settings(configured(changes))[0].async_training.policy == policy

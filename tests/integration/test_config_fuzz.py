# SPDX-License-Identifier: Apache-2.0
"""Random values of random settings: every combination is accepted, or refused with messages that name the settings."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe.async_engine.inspection.check import check_plain, plain
from recipe.async_engine.settings.fields import field_types
from recipe.async_engine.settings.plan import RunPlan
from recipe.async_engine.settings.problems import ConfigError
from recipe.async_engine.settings.sections import SECTIONS
from recipe.async_engine.task.tokenizer import build_tokenizer

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
# verl's own settings that this package looks at, before a run or while it prepares one.
VERL = [
    *(f"{ROLLOUT}.{name}" for name in (
        "name", "n", "tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size",
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "calculate_log_probs",
        "full_determinism", "free_cache_engine", "enable_sleep_mode", "agent.num_workers", "checkpoint_engine.backend",
        "checkpoint_engine.update_weights_bucket_megabytes",
    )),
    *(f"{ACTOR}.{name}" for name in (
        "strategy", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
        "ulysses_sequence_parallel_size", "fsdp_config.model_dtype", "checkpoint.async_save",
    )),
    *(f"data.{name}" for name in (
        "train_files", "val_files", "train_batch_size", "gen_batch_size", "max_prompt_length", "max_response_length",
        "prompt_key", "reward_fn_key", "filter_overlong_prompts", "train_max_samples", "custom_cls.path",
    )),
    *(f"trainer.{name}" for name in (
        "nnodes", "n_gpus_per_node", "total_epochs", "total_training_steps", "save_freq", "test_freq", "device",
        "resume_mode", "resume_from_path", "default_hdfs_dir", "max_actor_ckpt_to_keep",
    )),
    "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.model.path", "algorithm.adv_estimator", "critic.enable",
    "reward.num_workers", "reward.custom_reward_function.path", "reward.custom_reward_function.name",
    "reward.reward_manager.source", "reward.reward_model.enable", "reward.reward_model.enable_resource_pool",
    "reward.reward_model.nnodes", "reward.reward_model.n_gpus_per_node", "ray_kwargs.ray_init.num_gpus",
    "ray_kwargs.ray_init.address",
]  # fmt: skip
OWN = [
    f"{section}.{name}"
    for section, cls in SECTIONS.items()
    for name, types in field_types(cls).items()
    if types[0] in (int, float, bool, str)
]
SECTION_NAMES = [*SECTIONS, "data", "trainer", "reward", "actor_rollout_ref", ACTOR, ROLLOUT]

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 3, 7, 16, 10**9, 0.0, 0.5, -0.5, 1.5, 1e-300, float("inf"), float("nan")]),
    st.sampled_from(["", "x", "1", "vllm", "fsdp2", "megatron", "grpo", "gae", "cpu", "recipe_gloo", "/no/such", "~"]),
    st.sampled_from([[], [1], ["a.parquet"], {}, {"a": 1}]),
)
CHANGES = st.dictionaries(
    st.one_of(st.sampled_from(OWN), st.sampled_from(VERL), st.sampled_from(SECTION_NAMES)), ODD, min_size=1, max_size=4
)
NAMED = re.compile(r"[a-z_]+(\.[A-Za-z_0-9]+)*")


@pytest.fixture(scope="module", params=["fully_async", "one_step_off"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole configuration that runs."""
    folder = tmp_path_factory.mktemp("fuzz")
    build_tokenizer().save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text("{}")
    row = {"data_source": "s", "prompt": [{"role": "user", "content": "sort 1"}], "reward_model": {"ground_truth": "1"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 64), folder / "data.parquet")
    (folder / "reward.py").write_text("def compute_score(**kwargs):\n    return 0.0\n")
    overrides = [
        "preset=tiny_cpu",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'data.parquet'}",
        f"data.val_files={folder / 'data.parquet'}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
    ]
    GlobalHydra.instance().clear()
    with initialize_config_module(f"recipe.{request.param}.config", version_base=None):
        config = plain(compose(f"{request.param}_ppo_trainer", overrides=overrides))
    check_plain(config)
    return config


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for setting, value in changes.items():
        *parents, last = setting.split(".")
        node: Any = config
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[last] = copy.deepcopy(value)
    return config


@given(changes=CHANGES)
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_combination_is_accepted_or_refused_by_name(base: dict[str, Any], changes: dict[str, Any]) -> None:
    config = changed(base, changes)
    try:
        plan = check_plain(config)
    except ConfigError as error:
        for problem in error.problems:
            assert NAMED.fullmatch(problem.setting), problem
            assert problem.allowed, problem
            assert problem.advice, problem
            assert problem.setting in str(error)
        return
    assert isinstance(plan, RunPlan)
    assert plan.total_steps >= 1
    assert plan.rollout_replicas >= 1
    assert plan.pipeline_depth <= plan.max_staleness


def test_fuzz_reaches_both_outcomes(base: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(check_plain(changed(base, {"trainer.save_freq": 3})), RunPlan)
    with pytest.raises(ConfigError, match=r"trainer\.save_freq"):
        check_plain(changed(base, {"trainer.save_freq": "x"}))

# SPDX-License-Identifier: Apache-2.0
"""The partial-rollout mode's configurations: stock synchronous scripts, presets, the script for two nodes, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from recipe.async_engine.config.facts import Resources
from recipe.async_engine.config.plan import derive
from recipe.async_engine.config.validation import judge
from recipe.async_engine.inspection.check import plain

CHECKOUT = Path(__file__).resolve().parents[2]
FSDP = "partial_rollout_ppo_trainer"
MEGATRON = "partial_rollout_ppo_megatron_trainer"
SCRIPT = CHECKOUT / "recipe" / "partial_rollout" / "run_dapo_math17k_pr_4b_2node.sh"

# The shape of a script for stock verl's synchronous main, as its users have them.
STOCK_SCRIPT = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=/data/train.parquet",
    "data.val_files=/data/test.parquet",
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "actor_rollout_ref.model.path=/models/qwen",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
    "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0",
    "trainer.logger=['console']",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
]
STOCK_FSDP = [*STOCK_SCRIPT, "actor_rollout_ref.actor.fsdp_config.param_offload=False"]
STOCK_MEGATRON = [
    *STOCK_SCRIPT,
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
]


@pytest.fixture(autouse=True)
def anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def composed(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    with initialize_config_module("recipe.partial_rollout.config", version_base=None):
        return plain(compose(name, overrides=list(overrides)))


@pytest.mark.parametrize(("name", "script"), [(FSDP, STOCK_FSDP), (MEGATRON, STOCK_MEGATRON)])
def test_a_script_for_stock_synchronous_training_composes_validates_and_has_a_plan(
    name: str, script: list[str]
) -> None:
    config = composed(name, script)
    assert judge(config, dataset_rows=7000, available=Resources(accelerators=8))[0] == []
    plan = derive(config, dataset_rows=7000)
    assert (plan.batch_groups, plan.batches_per_version, plan.answers_per_group) == (1024, 1, 8)
    # Both sides have all accelerators; every place of the four engines is used, and a quarter as many answers wait.
    assert (plan.trainer_ranks, plan.rollout_replicas) == (8, 4)
    assert plan.engine_places == 4 * config["actor_rollout_ref"]["rollout"]["max_num_seqs"]
    assert plan.max_concurrent_trajectories == plan.engine_places * 5 // 4
    assert plan.total_steps == 15 * 7000 // 1024
    correction = config["algorithm"]["rollout_correction"]
    assert (correction["bypass_mode"], correction["rollout_is"], correction["rollout_is_threshold"]) == (
        False,
        "token",
        2.0,
    )


@pytest.mark.parametrize("preset", ["tiny_cpu", "tiny_cpu_long_tail"])
def test_the_presets_of_a_laptop_need_one_place_for_both_sides(preset: str) -> None:
    config = composed(FSDP, [f"preset={preset}"])
    assert judge(config, available=Resources(accelerators=1))[0] == []
    plan = derive(config)
    assert (plan.batch_groups, plan.trainer_ranks, plan.rollout_replicas, plan.max_staleness) == (16, 1, 1, 4)


def test_the_preset_of_one_gpu_validates_on_one() -> None:
    config = composed(FSDP, ["preset=one_gpu", "data.train_files=/data/a.parquet", "data.val_files=/data/b.parquet"])
    assert judge(config, dataset_rows=7473, available=Resources(accelerators=1))[0] == []
    plan = derive(config, dataset_rows=7473)
    assert (plan.batch_groups, plan.engine_places, plan.max_staleness) == (64, 256, 2)


def test_the_script_for_two_nodes_composes_and_validates() -> None:
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    shown = subprocess.run(
        ["bash", str(SCRIPT), "--cfg", "job"],
        # The script takes the python of the environment that is active.
        env=os.environ
        | {
            "PYTHONPATH": path,
            "HOME": "/home/user",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    config = OmegaConf.to_container(OmegaConf.create(shown.stdout), resolve=True)
    assert isinstance(config, dict)
    assert config["data"]["train_files"] == "/home/user/data/dapo-math-17k.parquet"
    assert judge(config, dataset_rows=17_000, available=Resources(accelerators=16))[0] == []
    plan = derive(config, dataset_rows=17_000)
    assert (plan.trainer_ranks, plan.rollout_replicas, plan.batch_groups) == (16, 16, 128)


REFUSED = {
    "async_training.trigger_parameter_sync_step=2": "async_training.trigger_parameter_sync_step",
    "async_training.partial_rollout=false": "async_training.partial_rollout",
    "async_training.admission_policy=whole_batches": "async_training.admission_policy",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=3": "trainer.n_gpus_per_node",
    "data.train_batch_size=20": "data.train_batch_size",
    "async_training.off_policy_mask=-1": "async_training.off_policy_mask",
    "async_training.staleness_threshold=2": None,
    "async_training.placement=both": "async_training.placement",
}


@pytest.mark.parametrize(("override", "setting"), REFUSED.items())
def test_what_does_not_fit_the_mode_is_refused_by_name(override: str, setting: str | None) -> None:
    found = {problem.setting for problem in judge(composed(FSDP, ["preset=tiny_cpu", override]))[0]}
    assert setting in found if setting else not found


def test_more_ranks_than_accelerators_are_refused_by_the_settings_of_both_sides() -> None:
    config = composed(FSDP, ["preset=tiny_cpu", "trainer.n_gpus_per_node=2"])
    (problem,) = judge(config, available=Resources(accelerators=1))[0]
    assert problem.setting == "trainer.n_gpus_per_node"
    assert "The run needs 2 trainer ranks." in problem.advice

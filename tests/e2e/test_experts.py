# SPDX-License-Identifier: Apache-2.0
"""A tiny mixture of experts in each mode: verl's engine packs its experts, the stream and vLLM have them one by one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from main_runs import FULLY_ASYNC, ONE_STEP_OFF, FinishedRun, run_main, small
from test_fully_async import DECOUPLED, check_books
from test_model_engine import check_served
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from recipe.laptop.task import TaskPaths

PARTIAL_ROLLOUT = "recipe.partial_rollout.main"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
STEPS = 4


@pytest.fixture(scope="module")
def experts_task(untrained_task: TaskPaths, tmp_path_factory: pytest.TempPathFactory) -> TaskPaths:
    """The untrained task with experts in place of each layer's MLP."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    shutil.copytree(untrained_task.model, folder)
    dense = AutoConfig.from_pretrained(folder).to_diff_dict()
    del dense["model_type"], dense["architectures"]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**dense, **EXPERTS)
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return TaskPaths(
        model=folder, train=untrained_task.train, val=untrained_task.val, reward_file=untrained_task.reward_file
    )


def check_exact(run: FinishedRun, steps: int, bound: int) -> None:
    """Every version arrived, none like the one before, and each step's answers are sampled by the weights they say."""
    check_books(run, steps, bound)
    assert run.summary["versions"] == steps and run.summary["unchanged_versions"] == 0
    differences = run.column("training/rollout_probs_diff_max")
    assert all(0 < difference < 1e-6 for difference in differences), differences


@pytest.mark.e2e
@pytest.mark.slow
def test_fully_async_with_two_trainer_ranks_and_a_log_prob_server(
    experts_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    overrides = [
        *small(experts_task, tmp_path, ray_dir),
        "model_engine_server=fsdp2",
        "trainer.n_gpus_per_node=2",
        "async_training.staleness_threshold=1",
        "async_training.max_staleness=1",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_exact(run, STEPS, bound=1)
    check_served(run, STEPS)


@pytest.mark.e2e
@pytest.mark.slow
def test_one_step_off_with_a_log_prob_server_of_two_ranks(
    experts_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    overrides = [
        *small(experts_task, tmp_path, ray_dir),
        "data.train_batch_size=4",
        "model_engine_server=fsdp2",
        "model_engine_server.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(ONE_STEP_OFF, overrides, tmp_path)
    check_exact(run, STEPS, bound=1)
    check_served(run, STEPS)
    assert run.column("fully_async/staleness/token_mean") == [0, *[1] * (STEPS - 1)]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("main", [FULLY_ASYNC, PARTIAL_ROLLOUT])
def test_weights_loaded_in_place_are_exact(main: str, experts_task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    """Partial rollout shares accelerators, so it loads in place."""
    own = ["async_training.weights.staging=none"] if main == FULLY_ASYNC else []
    overrides = [
        *small(experts_task, tmp_path, ray_dir),
        *own,
        DECOUPLED,
        "async_training.staleness_threshold=0",
        "async_training.max_staleness=0",
        f"trainer.total_training_steps={STEPS}",
    ]
    check_exact(run_main(main, overrides, tmp_path), STEPS, bound=0)

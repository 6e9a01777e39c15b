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

from recipe.async_engine.task import TaskPaths

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
    return TaskPaths(model=folder, train=untrained_task.train, val=untrained_task.val, reward_file=untrained_task.reward_file)


def test_try(experts_task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    overrides = [
        *small(experts_task, tmp_path, ray_dir),
        DECOUPLED,
        "async_training.staleness_threshold=0",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_books(run, STEPS, bound=0)
    print(run.column("training/rollout_probs_diff_max"))
    print(run.summary)

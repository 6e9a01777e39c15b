# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Stock verl's main, with the arguments of a published script and a flag, trains in each mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stock_overrides as stock
from main_process import short_run
from published import GRPO_GSM8K

from recipe.async_engine.flags.register import VARIABLE
from recipe.async_engine.task import TaskPaths

CHECKOUT = Path(__file__).parents[2]
STEPS = 3
# Of a laptop in the place of the script's eight accelerators, and of the tiny model in that of its own.
SCALED_DOWN = [
    "+preset=tiny_cpu",
    "data.train_batch_size=8",
    "data.max_prompt_length=32",
    "data.max_response_length=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.ref.fsdp_config.param_offload=False",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[console]",
    "trainer.save_freq=-1",
    f"trainer.total_training_steps={STEPS}",
]


@pytest.mark.e2e
@pytest.mark.parametrize("mode", ["fully_async", "one_step_off", "partial_rollout"])
def test_a_published_script_trains_by_a_flag(mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    overrides = [*GRPO_GSM8K, f"+recipe={mode}", *SCALED_DOWN, *short_run(task, tmp_path, ray_dir)]
    environment = stock.stock_environment(CHECKOUT) | {VARIABLE: "1"}
    finished = stock.forked_main("verl.trainer.main_ppo", overrides, tmp_path, environment)
    assert finished.returncode == 0, finished.stdout[-8000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["mode"], summary["error"], summary["steps"]) == (mode, None, STEPS)
    # Steps of data.train_batch_size prompts in two mini-batches, each prompt with the script's five answers.
    assert summary["ledger"]["trained"] == STEPS * 8
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["training/global_step"] for step in metrics] == [1, 2, 3]
    assert all(step["actor/kl_loss"] >= 0 for step in metrics)
    assert any(step["actor/grad_norm"] > 0 for step in metrics)


@pytest.mark.e2e
def test_a_batch_that_does_not_divide_is_refused_by_its_setting(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    overrides = [*GRPO_GSM8K, "+recipe=fully_async", *SCALED_DOWN, *short_run(task, tmp_path, ray_dir)]
    environment = stock.stock_environment(CHECKOUT) | {VARIABLE: "1"}
    finished = stock.forked_main(
        "verl.trainer.main_ppo", [*overrides, "data.train_batch_size=10"], tmp_path, environment
    )
    assert finished.returncode != 0
    assert "data.train_batch_size=10 is no multiple of actor_rollout_ref.actor.ppo_mini_batch_size=4" in finished.stdout
    assert not (tmp_path / "summary.json").exists()

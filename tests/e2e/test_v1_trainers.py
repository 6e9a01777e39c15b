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
"""Stock verl's v1 trainer `separate_async` on the CPU platform: how old the oldest token of a batch is by strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stock_overrides as stock
from main_process import short_run

from recipe.async_engine.task import TaskPaths

CHECKOUT = Path(__file__).parents[2]
STEPS, GROUPS, THRESHOLD, WARMUP = 7, 4, 2, 3
OLDEST = "training/off_policy/trajectory_staleness_worst/max"
EVICTED = "training/off_policy/evicted_samples"
BOUNDED = (
    "trainer.v1.sampler.custom_sampler.path=pkg://recipe.async_engine.v1.sampler",
    "trainer.v1.sampler.custom_sampler.name=BoundedReplayBuffer",
)


def steps_of(
    strategy: str, sampler: tuple[str, ...], task: TaskPaths, folder: Path, ray_dir: Path
) -> list[dict[str, Any]]:
    """The metrics of each step, with three batches issued ahead under a threshold that has room for one."""
    log = folder / "metrics.jsonl"
    overrides = [
        "+preset=tiny_cpu",
        *short_run(task, folder, ray_dir),
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={GROUPS}",
        "data.gen_batch_size=1",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        f"trainer.v1.separate_async.num_warmup_batches={WARMUP}",
        f"trainer.v1.sampler.max_off_policy_threshold={THRESHOLD}",
        f"trainer.v1.sampler.max_off_policy_strategy={strategy}",
        *sampler,
        "+async_training.partial_rollout=true",
        "trainer.logger=[console,file]",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={STEPS}",
    ]
    environment = stock.stock_environment(CHECKOUT) | {"VERL_FILE_LOGGER_PATH": str(log)}
    finished = stock.forked_main("verl.trainer.main_ppo", overrides, folder, environment)
    assert finished.returncode == 0, finished.stdout[-8000:]
    lines = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    steps = [line for line in lines if "actor/grad_norm" in line]
    assert len(steps) == STEPS
    return steps


def of_all(steps: list[dict[str, Any]], key: str) -> float:
    return sum(step.get(key, 0) for step in steps)


@pytest.mark.e2e
def test_the_bounded_sampler_keeps_the_bound_and_evicts_nothing(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    steps = steps_of("wait", BOUNDED, task, tmp_path, ray_dir)
    assert max(step[OLDEST] for step in steps) <= THRESHOLD - 1
    assert of_all(steps, EVICTED) == 0
    # Three batches and that of the step were asked for, two of them may be under way.
    assert steps[0]["training/off_policy/held_back_prompts"] == (WARMUP + 1 - THRESHOLD) * GROUPS


@pytest.mark.e2e
@pytest.mark.slow
def test_verls_strategy_wait_trains_past_the_bound(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    steps = steps_of("wait", (), task, tmp_path, ray_dir)
    assert of_all(steps, EVICTED) == 0
    assert max(step[OLDEST] for step in steps) > THRESHOLD - 1


@pytest.mark.e2e
@pytest.mark.slow
def test_verls_strategy_drop_keeps_the_bound_by_evicting_groups(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    steps = steps_of("drop", (), task, tmp_path, ray_dir)
    assert max(step[OLDEST] for step in steps) <= THRESHOLD - 1
    assert of_all(steps, EVICTED) > 0

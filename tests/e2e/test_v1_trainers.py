# SPDX-License-Identifier: Apache-2.0
"""verl's v1 trainers on the CPU platform: how old a batch's oldest token is by strategy, and our parts beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import stock_overrides as stock
from main_process import last_words, short_run

from recipe.laptop.task import TaskPaths
from recipe.mains.register import VARIABLE

pytestmark = pytest.mark.vllm("verl's v1 trainers are refused with SGLang")

CHECKOUT = Path(__file__).parents[2]
STEPS, GROUPS, THRESHOLD, WARMUP = 7, 4, 2, 3
OLDEST = "training/off_policy/trajectory_staleness_worst/max"
EVICTED = "training/off_policy/evicted_samples"
FALLBACK = "model_engine_server/fallback_rows"
SPANS = "training/off_policy/trajectory_spans/max"
ROUNDING = 1e-5
BOUNDED = (
    "trainer.v1.sampler.custom_sampler.path=pkg://recipe.async_engine.v1.sampler",
    "trainer.v1.sampler.custom_sampler.name=BoundedReplayBuffer",
)


@dataclass(frozen=True)
class V1Run:
    """What a run printed, and the metrics of its steps."""

    output: str
    steps: list[dict[str, Any]]

    def sum(self, key: str) -> float:
        return sum(step.get(key, 0) for step in self.steps)

    def column(self, key: str) -> list[float]:
        return [step[key] for step in self.steps]


def run_v1(
    trainer: str, more: Sequence[str], task: TaskPaths, folder: Path, ray_dir: Path, flagged: bool = True
) -> V1Run:
    """A run with three batches issued ahead under a threshold that has room for one; by this package's flag or not."""
    log = folder / "metrics.jsonl"
    overrides = [
        *([f"+recipe={trainer}"] if flagged else []),
        "+preset=tiny_cpu",
        *short_run(task, folder, ray_dir),
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={GROUPS}",
        "data.gen_batch_size=1",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "trainer.v1.separate_async.parameter_sync_step=1",
        f"trainer.v1.{trainer}.num_warmup_batches={WARMUP}",
        f"trainer.v1.sampler.max_off_policy_threshold={THRESHOLD}",
        "trainer.logger=[console,file]",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={STEPS}",
        *more,
    ]
    environment = stock.stock_environment(CHECKOUT) | {"VERL_FILE_LOGGER_PATH": str(log)}
    if flagged:
        # As the flag sets it, for workers that are forked from a process that has imported verl before.
        environment[VARIABLE] = "1"
    finished = stock.forked_main("verl.trainer.main_ppo", overrides, folder, environment)
    assert finished.returncode == 0, last_words(finished)
    lines = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    steps = [line for line in lines if "actor/grad_norm" in line]
    assert len(steps) == STEPS
    return V1Run(finished.stdout, steps)


def assert_bounded(run: V1Run) -> None:
    assert max(run.column(OLDEST)) <= THRESHOLD - 1
    assert run.sum(EVICTED) == 0
    # Three batches and that of the step were asked for, two of them may be under way.
    assert run.steps[0]["training/off_policy/held_back_prompts"] == (WARMUP + 1 - THRESHOLD) * GROUPS


def stock_run(strategy: str, more: Sequence[str], task: TaskPaths, folder: Path, ray_dir: Path) -> V1Run:
    """Of the stock trainer `separate_async`."""
    overrides = [
        "trainer.v1.trainer_mode=separate_async",
        f"trainer.v1.sampler.max_off_policy_strategy={strategy}",
        "+async_training.partial_rollout=true",
        *more,
    ]
    return run_v1("separate_async", overrides, task, folder, ray_dir, flagged=False)


@pytest.mark.e2e
@pytest.mark.slow
def test_the_bounded_sampler_keeps_the_bound_and_evicts_nothing(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    run = stock_run("wait", BOUNDED, task, tmp_path, ray_dir)
    assert_bounded(run)


@pytest.mark.e2e
@pytest.mark.slow
def test_verls_strategy_wait_trains_past_the_bound(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    run = stock_run("wait", (), task, tmp_path, ray_dir)
    assert run.sum(EVICTED) == 0
    assert max(run.column(OLDEST)) > THRESHOLD - 1


@pytest.mark.e2e
@pytest.mark.slow
def test_verls_strategy_drop_keeps_the_bound_by_evicting_groups(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    run = stock_run("drop", (), task, tmp_path, ray_dir)
    assert max(run.column(OLDEST)) <= THRESHOLD - 1
    assert run.sum(EVICTED) > 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["separate_async", "colocate_async"])
def test_a_flag_puts_bound_gate_and_log_prob_servers_beside_verls_trainer(
    trainer: str, task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    shown = "ray_kwargs.ray_init.log_to_driver=true"
    run = run_v1(trainer, ("model_engine_server=fsdp2", shown), task, tmp_path, ray_dir)
    assert_bounded(run)
    assert "(GatedVLLMHttpServer pid=" in run.output
    assert "(vLLMHttpServer pid=" not in run.output
    assert run.sum(FALLBACK) == 0
    # Of answers that one version sampled, it is the version that scored them.
    of_one_version = [step for step in run.steps if step[SPANS] == 1]
    assert of_one_version
    assert max(step["training/rollout_probs_diff_max"] for step in of_one_version) < ROUNDING


@pytest.mark.e2e
@pytest.mark.slow
def test_the_trainer_computes_what_no_server_scored(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    late = ("model_engine_server=fsdp2", "model_engine_server.timeout=0.001")
    run = run_v1("separate_async", late, task, tmp_path, ray_dir)
    assert run.sum(FALLBACK) > 0
    assert max(run.column("actor/entropy")) > 0

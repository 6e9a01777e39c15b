# SPDX-License-Identifier: Apache-2.0
"""Stock verl's main, with the arguments of a published script and a flag, trains in each mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stock_overrides as stock
from main_process import last_words, short_run
from published import DAPO, GRPO_GSM8K, PPO_CRITIC, SCALED_DOWN
from teaching import taught_by

from recipe.laptop.task import TaskPaths
from recipe.mains.register import VARIABLE

CHECKOUT = Path(__file__).parents[2]
STEPS = 3
ENDS = f"trainer.total_training_steps={STEPS}"


MODES = ("fully_async", "one_step_off", "partial_rollout")


def train(mode: str, script: list[str], task: TaskPaths, folder: Path, ray_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a run that ended well: of `data.train_batch_size` prompts, in two mini-batches."""
    overrides = [*script, f"+recipe={mode}", *SCALED_DOWN, ENDS, *short_run(task, folder, ray_dir)]
    environment = stock.stock_environment(CHECKOUT) | {VARIABLE: "1"}
    finished = stock.forked_main("verl.trainer.main_ppo", overrides, folder, environment)
    assert finished.returncode == 0, last_words(finished)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["mode"], summary["error"], summary["steps"]) == (mode, None, STEPS)
    assert summary["ledger"]["trained"] == STEPS * 8
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["training/global_step"] for step in metrics] == [1, 2, 3]
    assert any(step["actor/grad_norm"] > 0 for step in metrics)
    return metrics


def one_in_ci(mode: str) -> list[Any]:
    """All modes, of which `make test` runs one."""
    return [pytest.param(each, marks=() if each == mode else pytest.mark.slow) for each in MODES]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_published_grpo_script_trains_by_a_flag(mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    metrics = train(mode, GRPO_GSM8K, task, tmp_path, ray_dir)
    assert all(step["actor/kl_loss"] >= 0 for step in metrics)


@pytest.mark.e2e
@pytest.mark.parametrize("mode", one_in_ci("one_step_off"))
def test_the_published_ppo_script_trains_its_critic_by_a_flag(
    mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    scaled = ["critic.model.use_remove_padding=False", "critic.model.enable_gradient_checkpointing=False"]
    metrics = train(mode, [*PPO_CRITIC, *scaled], task, tmp_path, ray_dir)
    assert all(step["critic/grad_norm"] > 0 and step["critic/vf_loss"] > 0 for step in metrics)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_published_dapo_script_filters_groups_by_a_flag(
    mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    scaled = [
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_batched_tokens=8192",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    ]
    metrics = train(mode, [*DAPO, *scaled], task, tmp_path, ray_dir)
    # The tiny model answers some prompts right four times out of four.
    assert metrics[-1]["fully_async/ledger/filtered_uniform"] > 0
    # What is trained has answers of both kinds, so every batch has advantages.
    assert all(step["critic/advantages/max"] > 0 > step["critic/advantages/min"] for step in metrics)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_teacher_by_a_flag(
    mode: str, untrained_task: TaskPaths, task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    teacher = taught_by(untrained_task.model, loss_mode="k3", loss_max_clamp=10)
    metrics = train(mode, [*GRPO_GSM8K, *teacher], task, tmp_path, ray_dir)
    assert all(step["actor/distillation/loss"] > 0 for step in metrics)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_flag_with_rehearse_only_rehearses_and_ends(mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    arguments = [*GRPO_GSM8K, f"+recipe={mode}", *SCALED_DOWN, *short_run(task, tmp_path, ray_dir)]
    environment = stock.stock_environment(CHECKOUT) | {VARIABLE: "1"}
    # The table is written by the run's own process, as what else a flag shows.
    arguments += ["ray_kwargs.ray_init.log_to_driver=true", "rehearse_only=true"]
    finished = stock.forked_main("verl.trainer.main_ppo", arguments, tmp_path, environment)
    assert finished.returncode == 0, last_words(finished)
    assert "log-probs agree" in finished.stdout
    summary = json.loads((tmp_path / "rehearsal" / "summary.json").read_text())
    assert {check["outcome"] for check in summary["rehearsal"]["checks"]} <= {"passed", "left out"}
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.e2e
@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused_by_its_setting(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    overrides = [*GRPO_GSM8K, "+recipe=fully_async", *SCALED_DOWN, ENDS, *short_run(task, tmp_path, ray_dir)]
    environment = stock.stock_environment(CHECKOUT) | {VARIABLE: "1"}
    finished = stock.forked_main(
        "verl.trainer.main_ppo", [*overrides, "data.train_batch_size=10"], tmp_path, environment
    )
    assert finished.returncode != 0
    assert "data.train_batch_size=10 is no multiple of actor_rollout_ref.actor.ppo_mini_batch_size=4" in finished.stdout
    assert not (tmp_path / "summary.json").exists()

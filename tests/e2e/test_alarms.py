# SPDX-License-Identifier: Apache-2.0
"""Runs that nothing fails in and that do not do what they should: the summary and the exit status say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stock_overrides as stock
from main_process import last_words, short_run
from main_runs import FULLY_ASYNC, run_main, small
from published import GRPO_GSM8K, SCALED_DOWN
from surroundings import CHECKOUT

from recipe.laptop.task import TaskPaths
from recipe.mains.register import VARIABLE
from recipe.report.__main__ import main as report

CONSTANT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return 0.5
"""
HALF_RAISES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if extra_info["index"] % 5 in (0, 2, 4):
        raise RuntimeError("429: too many requests")
    return float(len(solution_str) % 2)
"""


def with_reward(text: str, folder: Path) -> str:
    reward = folder / "reward.py"
    reward.write_text(text)
    return f"reward.custom_reward_function.path={reward}"


@pytest.mark.e2e
@pytest.mark.slow
def test_rewards_all_alike_and_gradients_of_0_ring_and_end_a_run_past_a_limit_that_is_set(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    overrides = [
        *small(task, tmp_path, ray_dir),
        with_reward(CONSTANT, tmp_path),
        "async_training.alarms.exit_status=true",
        "trainer.save_freq=100",
    ]
    run = run_main(FULLY_ASYNC, [*overrides, "trainer.total_training_steps=5"], tmp_path)
    assert run.returncode == 3, run.output[-8000:]
    assert (run.summary["ended"], run.summary["error"]) == ("with_alarms", None)
    counts = {name: alarm["count"] for name, alarm in run.summary["alarms"].items()}
    assert counts == {"uniform_rewards": 5, "zero_gradients": 5}
    assert run.column("fully_async/alarms/zero_gradients") == [0, 0, 3, 4, 5]
    assert "the run ended with alarms" in run.output and "alarm uniform_rewards, 5 steps" in run.output
    assert report([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "with alarms (zero_gradients 5, uniform_rewards 5)" in page and "<h2>Alarms</h2>" in page

    more = ["trainer.total_training_steps=20", "async_training.alarms.zero_gradients=4"]
    run = run_main(FULLY_ASYNC, [*overrides, *more], tmp_path)
    assert run.returncode == 1
    assert (run.summary["ended"], run.summary["error"]["name"]) == ("failed", "AlarmLimit")
    assert "async_training.alarms.zero_gradients=4" in run.summary["error"]["message"]
    # What rang before the checkpoint counts on; the row begins anew.
    assert run.summary["steps"] == 9 and run.summary["alarms"]["zero_gradients"]["count"] == 5 + 4


@pytest.mark.e2e
@pytest.mark.slow
def test_more_failed_groups_than_the_limit_end_a_run(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    overrides = [
        *small(task, tmp_path, ray_dir),
        with_reward(HALF_RAISES, tmp_path),
        "async_training.max_group_retries=0",
        "data.shuffle=false",
        "trainer.total_training_steps=100",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    assert run.returncode == 1, run.output[-8000:]
    assert run.summary["error"]["name"] == "AlarmLimit"
    assert "429: too many requests" in run.summary["error"]["message"]
    assert "async_training.alarms.failed_groups=0.5" in run.summary["error"]["message"]
    assert run.summary["ended"] == "failed"
    assert run.summary["ledger"]["failed"] > 16


@pytest.mark.e2e
@pytest.mark.slow
def test_a_main_with_a_flag_exits_with_alarms(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    overrides = [
        *GRPO_GSM8K,
        "+recipe=fully_async",
        *SCALED_DOWN,
        *short_run(task, tmp_path, ray_dir),
        with_reward(CONSTANT, tmp_path),
        "actor_rollout_ref.actor.use_kl_loss=false",
        "trainer.total_training_steps=4",
    ]
    environment = stock.stock_environment(CHECKOUT) | {VARIABLE: "1"}
    finished = stock.forked_main("verl.trainer.main_ppo", overrides, tmp_path, environment)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert finished.returncode == 3, last_words(finished)
    assert (summary["ended"], summary["steps"]) == ("with_alarms", 4)
    assert summary["alarms"]["uniform_rewards"]["count"] == 4

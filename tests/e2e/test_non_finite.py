# SPDX-License-Identifier: Apache-2.0
"""Rewards that are no numbers for some prompts: counted, never trained, and left out of validation."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, run_main, small

from recipe.laptop.task import TaskPaths

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    # Of the training prompts and of the validation prompts, each in its own order.
    return float("nan") if extra_info["index"] % 7 == 3 else float(len(solution_str) % 2)
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_reward_that_is_none_for_some_prompts_costs_these_prompts_and_says_so(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    steps = 8
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        f"reward.custom_reward_function.path={reward}",
        "async_training.on_non_finite=drop",
        "async_training.trigger_parameter_sync_step=2",
        "data.shuffle=false",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=2",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    assert run.returncode == 0, run.output[-8000:]
    ledger = run.summary["ledger"]
    lost = ledger["filtered"]
    assert lost >= steps * 4 // 7 and ledger["failed"] == 0
    assert run.column("fully_async/ledger/non_finite")[-1] == lost
    assert ledger["trained"] == steps * 4 == ledger["issued"] - lost - ledger["live"]
    # Every update was made, of finite numbers.
    assert run.summary["skipped_updates"] == sum(run.column("actor/skipped_updates")) == 0
    assert all(step["actor/grad_norm"] >= 0 and step["critic/score/max"] <= 1 for step in run.metrics)
    assert sum(run.column("fully_async/non_finite/metrics")) == 0
    validated = [step for step in run.metrics if "val-aux/num_failed" in step]
    assert validated and all(step["val-aux/num_failed"] > 0 for step in validated)
    assert 0 <= run.summary["validation"]["last"] <= 1

# SPDX-License-Identifier: Apache-2.0
"""A run whose trainer lends its accelerators to hybrid replicas while it waits, beside one standalone replica."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, long_answers, run_main, small
from test_fully_async import check_books

from recipe.laptop.task import TaskPaths

LENDING = "fully_async/lending"


@pytest.mark.e2e
def test_accelerators_are_lent_while_the_trainer_waits_and_no_token_is_lost(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 8
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        *long_answers(tmp_path, monkeypatch),
        "async_training.placement=elastic",
        "async_training.trigger_parameter_sync_step=2",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "async_training.concurrent_samples_per_replica=null",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=4",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_books(run, steps, bound=4)
    assert run.column(f"{LENDING}/switches")[-1] >= 2
    assert run.column(f"{LENDING}/lent_seconds")[-1] > 0
    seconds = run.summary["account"]["seconds"]
    assert set(seconds) == {"rollout 0", "rollout 1"}
    # Trainer and hybrid replica are one device.
    assert seconds["rollout 0"]["training"] > 0 and seconds["rollout 0"]["decoding"] > 0
    assert seconds["rollout 0"]["wait_switch"] > 0 and "wait_switch" not in seconds["rollout 1"]

# SPDX-License-Identifier: Apache-2.0
"""Each mode learns the built-in task, and learns nothing where there is nothing to learn. Long: `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import ENGINE, FinishedRun, run_main

LONG_RUN_S = 1800


def tiny_cpu(tmp_path: Path, ray_dir: Path, *overrides: str, mode: str = "fully_async") -> FinishedRun:
    run = run_main(
        f"recipe.{mode}.main",
        [
            "preset=tiny_cpu",
            f"actor_rollout_ref.rollout.name={ENGINE}",
            f"trainer.default_local_dir={tmp_path}",
            f"hydra.run.dir={tmp_path}/hydra",
            f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
            *overrides,
        ],
        tmp_path,
        timeout_s=LONG_RUN_S,
    )
    assert run.returncode == 0, run.output[-8000:]
    return run


def gain(run: FinishedRun) -> float:
    validation = run.summary["validation"]
    return validation["last"] - validation["first"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "bound"), [("fully_async", 4), ("one_step_off", 1), ("partial_rollout", 4)])
def test_preset_learns_the_builtin_task(mode: str, bound: int, tmp_path: Path, ray_dir: Path) -> None:
    summary = tiny_cpu(tmp_path, ray_dir, mode=mode).summary
    assert summary["validation"]["first"] <= 0.5
    assert summary["validation"]["last"] >= 0.9
    assert summary["first_step_seconds"] <= 180
    assert summary["peak_memory_gib"] <= 12
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"] == bound


@pytest.mark.e2e
@pytest.mark.slow
def test_learning_rate_zero_gains_nothing(tmp_path: Path, ray_dir: Path) -> None:
    assert abs(gain(tiny_cpu(tmp_path, ray_dir, "actor_rollout_ref.actor.optim.lr=0"))) <= 0.1


@pytest.mark.e2e
@pytest.mark.slow
def test_permuted_rewards_gain_nothing(tmp_path: Path, ray_dir: Path) -> None:
    assert gain(tiny_cpu(tmp_path, ray_dir, "builtin_task.permute_rewards=true")) <= 0.1

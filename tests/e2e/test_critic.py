# SPDX-License-Identifier: Apache-2.0
"""PPO with a critic: trained with every batch, kept by checkpoints, and of use to the policy."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from main_runs import ENGINE, FULLY_ASYNC, ONE_STEP_OFF, run_main, small

from recipe.laptop.task import TaskPaths

GAE = ("algorithm.adv_estimator=gae", "algorithm.gamma=1.0", "algorithm.lam=1.0")
LONG_RUN_S = 1800


def updates(folder: Path, step: int) -> int:
    """How often the optimizer of a checkpoint's critic has updated."""
    optimizer = torch.load(
        folder / f"global_step_{step}" / "critic" / "optim_world_size_1_rank_0.pt", weights_only=False
    )
    (count,) = {int(state["step"]) for state in optimizer["state"].values()}
    return count


@pytest.mark.e2e
@pytest.mark.slow
def test_critic_is_trained_beside_the_actor_and_a_resumed_one_goes_on(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    folder = tmp_path / "run"

    def overrides(steps: int) -> list[str]:
        return [
            *small(task, folder, ray_dir),
            *GAE,
            "critic.ppo_mini_batch_size=2",
            "trainer.critic_warmup=2",
            "trainer.save_freq=8",
            f"trainer.total_training_steps={steps}",
        ]

    first = run_main(FULLY_ASYNC, overrides(8), folder)
    assert first.returncode == 0, first.output[-8000:]
    assert [("actor/grad_norm" in step) for step in first.metrics] == [False] + [True] * 7
    assert all(step["critic/grad_norm"] > 0 for step in first.metrics)
    assert updates(folder, 8) == 8 * 2

    second = run_main(FULLY_ASYNC, overrides(10), folder)
    assert second.returncode == 0, second.output[-8000:]
    assert second.summary["ledger"]["trained"] == 40
    assert all(map(math.isfinite, second.column("critic/vf_loss")))
    # One that began again would have those of the last two steps.
    assert updates(folder, 10) == 10 * 2


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("main", [FULLY_ASYNC, ONE_STEP_OFF])
def test_policy_learns_the_builtin_task_with_a_critic(main: str, tmp_path: Path, ray_dir: Path) -> None:
    overrides = [
        "preset=tiny_cpu",
        f"actor_rollout_ref.rollout.name={ENGINE}",
        f"trainer.default_local_dir={tmp_path}",
        f"hydra.run.dir={tmp_path}/hydra",
        f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        *GAE,
    ]
    run = run_main(main, overrides, tmp_path, timeout_s=LONG_RUN_S)
    assert run.returncode == 0, run.output[-8000:]
    validation = run.summary["validation"]
    assert validation["first"] <= 0.5
    assert validation["last"] >= 0.9

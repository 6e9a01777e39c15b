# SPDX-License-Identifier: Apache-2.0
"""Rewards that are no number, raise, hang or leak, odd answers, and a replica ten times slower: a run trains the rest.

Each costs its own group, and none is trained: in training and in validation.
"""

from __future__ import annotations

import math
from pathlib import Path

import odd_reward
import pytest
from drilled_run import check_books
from main_runs import FULLY_ASYNC, decode_steps, run_main, small
from odd_reward import HARMLESS, way

from recipe.async_engine.task import TaskPaths

STEPS, GROUPS = 24, 4


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_whatever_a_reward_or_an_answer_is_costs_its_own_group(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_steps(monkeypatch, 0.05)
    monkeypatch.setenv("REWARD_HUNG", str(tmp_path / "hung"))
    monkeypatch.setenv("SLOW_ONE", str(tmp_path / "slow_one"))
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text("- name: odd\n  _target_: odd_generation.OddAnswers\n")
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        f"{rollout}.engine_kwargs.vllm.worker_extension_cls=odd_generation.OneSlowReplica",
        f"{rollout}.agent.agent_loop_config_path={loops}",
        f"{rollout}.agent.default_agent_loop=odd",
        f"reward.custom_reward_function.path={odd_reward.__file__}",
        "rollout.n_gpus_per_node=2",
        "data.shuffle=false",
        "async_training.reward_processes=2",
        "async_training.reward_memory_gib=1",
        "async_training.timeouts.reward=3",
        "async_training.max_group_retries=1",
        "trainer.save_freq=8",
        "trainer.test_freq=8",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    assert run.returncode == 0, run.output[-8000:]
    # One reward did hang, and one replica was slow.
    assert (tmp_path / "hung").exists()
    assert (tmp_path / "slow_one").exists()
    check_books(run, STEPS * GROUPS)
    prompts = run.rollout_state()["ledger"]["trained_prompts"]
    ways = {way(n) for _, start, stop in prompts for n in range(start, stop)} - {None}
    assert ways <= set(HARMLESS)
    assert run.summary["ledger"]["failed"] >= len(set(odd_reward.WAYS) - set(HARMLESS))
    for step in run.metrics:
        for name in ("critic/rewards/mean", "critic/advantages/mean", "actor/grad_norm", "actor/pg_loss"):
            assert math.isfinite(step[name]), (step["training/global_step"], name)
    validated = [step for step in run.metrics if "val-aux/num_failed" in step]
    assert len(validated) == STEPS // 8
    for step in validated:
        # A reward of the validation prompts is NaN, one raises, one is infinite and one is no number.
        assert step["val-aux/num_failed"] >= 4
        means = [value for key, value in step.items() if key.startswith("val-core/")]
        assert means
        assert all(map(math.isfinite, means))

# SPDX-License-Identifier: Apache-2.0
"""A run whose agent loop does everything wrong for every second prompt: it trains the others, and says what was."""

from __future__ import annotations

from pathlib import Path

import odd_agent_loop
import pytest
from main_runs import FULLY_ASYNC, run_main, small
from odd_agent_loop import DEADLY, FAILING, HARMLESS, WORDS, way

from recipe.async_engine.task.builder import TaskPaths

STEPS, GROUPS = 8, 4


@pytest.mark.e2e
@pytest.mark.slow
def test_whatever_agent_loops_do_costs_their_own_prompts_and_no_run(
    untrained_task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILING_INDEX", "none")
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text(f"- name: odd\n  _target_: {odd_agent_loop.__name__}.OddAgentLoop\n")
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        f"{rollout}.n=2",
        f"{rollout}.agent.agent_loop_config_path={loops}",
        f"{rollout}.agent.default_agent_loop=odd",
        f"{rollout}.agent.num_workers=2",
        "data.shuffle=false",
        "async_training.max_group_retries=1",
        "async_training.timeouts.agent_worker=8",
        "async_training.timeouts.trajectory=60",
        "trainer.save_freq=8",
        "trainer.test_freq=8",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path, timeout_s=900)
    assert run.returncode == 0, run.output[-8000:]
    ledger = run.summary["ledger"]
    assert ledger["trained"] == STEPS * GROUPS
    prompts = run.rollout_state()["ledger"]["trained_prompts"]
    trained = {n for _, start, stop in prompts for n in range(start, stop)}
    ways = {way(n) for n in trained} - {None}
    assert ways <= HARMLESS.keys()
    assert ledger["failed"] > 0 and WORDS in run.output + capfd.readouterr().err
    assert "agent_loop_worker_restarts" in str(run.metrics[-1]) and DEADLY and FAILING
    # A validation goes the same way.
    assert run.summary["validation"]["failed"] > 0 and run.summary["validation"]["last"] is not None

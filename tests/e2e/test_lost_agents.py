# SPDX-License-Identifier: Apache-2.0
"""An agent-loop worker is killed with answers under way, alone or beside another: it is started again, nothing is lost.

`make test-all`; tests/e2e/test_replacement.py has the death of one of two in every run of the tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import long_answers, run_main, small
from test_fully_async import check_books

from recipe.laptop.task import TaskPaths

STEPS = 12
FULLY_ASYNC = ("fully_async:losing_agents.LosingAgents", "async_training.max_staleness=1", 1)
PARTIAL = ("partial_rollout:losing_agents.LosingAgents", "async_training.max_staleness=2", 2)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("main", "setting", "bound"), [FULLY_ASYNC, PARTIAL], ids=["fully_async", "partial_rollout"])
def test_answers_of_a_killed_agent_loop_worker_begin_again_and_it_is_started_again(
    main: str,
    setting: str,
    bound: int,
    workers: int,
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overrides = [
        *small(task, tmp_path, ray_dir),
        setting,
        *long_answers(tmp_path, monkeypatch),
        f"actor_rollout_ref.rollout.agent.num_workers={workers}",
        "trainer.test_freq=5",
        "data.val_max_samples=8",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(main, overrides, tmp_path)
    check_books(run, STEPS, bound)
    assert run.summary["ledger"]["failed"] == 0
    agents = run.column("fully_async/count/live_agent_loop_workers")
    assert (agents[0], agents[-1]) == (workers, workers)
    assert run.column("fully_async/count/agent_loop_worker_restarts")[-1] == 1
    validated = [
        step["training/global_step"] for step in run.metrics if any(key.startswith("val-core/") for key in step)
    ]
    assert validated == [5, 10, 12]

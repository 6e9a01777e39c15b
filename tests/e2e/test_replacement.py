# SPDX-License-Identifier: Apache-2.0
"""A rollout replica, a log-prob server and an agent-loop worker are killed in a run; others take their places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from main_runs import run_main, small
from test_fully_async import check_books

from recipe.laptop.task import TaskPaths


@pytest.mark.e2e
def test_killed_replica_log_prob_server_and_agent_loop_worker_are_replaced_and_serve(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 24
    monkeypatch.setenv("KILL_AT_STEP", "3")
    monkeypatch.setenv("REPLACED", str(tmp_path / "replaced.json"))
    overrides = [
        *small(task, tmp_path, ray_dir),
        "rollout.n_gpus_per_node=2",
        "model_engine_server=fsdp2",
        "async_training.staleness_threshold=1",
        "async_training.max_staleness=1",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "trainer.test_freq=3",
        "data.val_max_samples=16",
        "async_training.timeouts.first_weights=2",
        f"trainer.total_training_steps={steps}",
        # For `min_tokens`, and for answers over HTTP, SGLang needs its tokenizer.
        "actor_rollout_ref.rollout.skip_tokenizer_init=false",
    ]
    run = run_main("fully_async:replacing.ReplacingTrainer", overrides, tmp_path)
    check_books(run, steps, bound=1)
    live, servers = run.column("fully_async/count/live_replicas"), run.column("model_engine_server/servers")
    assert (live[0], servers[0]) == (2, 1)
    assert min(live) == 1 and min(servers) == 0, "both were missed for a while"
    assert run.metrics[-1]["fully_async/count/restarts"] == 2
    assert (live[-1], servers[-1]) == (2, 1)
    agents = run.column("fully_async/count/live_agent_loop_workers")
    assert (agents[0], agents[-1]) == (2, 2)
    assert run.metrics[-1]["fully_async/count/agent_loop_worker_restarts"] == 1
    # At step 3 with one agent-loop worker.
    validated = [
        step["training/global_step"] for step in run.metrics if any(key.startswith("val-core/") for key in step)
    ]
    assert validated == list(range(3, steps + 1, 3))
    # The trainer did the work of the log-prob server until the next one held weights.
    fallback = run.column("model_engine_server/fallback_rows")
    assert max(fallback) > 0 and fallback[-1] == 0
    replaced = json.loads((tmp_path / "replaced.json").read_text())
    # Refused before the first weights, answered with them.
    assert replaced["http_statuses"] == [503, 200]
    assert replaced["dropped"]
    assert replaced["replica"] == 2 and replaced["asked"] > 0
    assert replaced["server"] == 1 and replaced["answered_tokens"] > 0

# SPDX-License-Identifier: Apache-2.0
"""Runs on clusters of two and four Ray nodes, of which some are lost and others join.

The nodes are raylets with addresses of their own on loopback; test_partition.py has nodes in namespaces.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from drilled_run import DrilledRun, drilled
from main_runs import FULLY_ASYNC, RAY_FOLDER, small, trainer_log
from ray_nodes import Loopback, Nodes, closing
from surroundings import shared_forks, usual_environment

from recipe.async_engine.task import TaskPaths

END_S = 60.0
ENDLESS = 100_000
LIVE, AGENTS = "fully_async/count/live_replicas", "fully_async/count/live_agent_loop_workers"


def on(nodes: Nodes, overrides: list[str]) -> list[str]:
    """Of a run on this cluster, whose processes are forks: its Ray has a folder already."""
    forks = shared_forks(usual_environment())
    own = [item for item in overrides if "_temp_dir" not in item]
    return [*own, f"ray_kwargs.ray_init.runtime_env.py_executable={forks}"]


def joining(nodes: Nodes) -> list[str]:
    return ["env", f"RAY_ADDRESS={nodes.ray_address}"]


def newest(run: DrilledRun, column: str) -> float:
    steps = run.steps()
    return steps[-1][column] if steps else -1.0


@pytest.mark.e2e
@pytest.mark.chaos
def test_run_goes_on_without_a_node_that_is_lost_and_uses_one_that_joins(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """With a preset, whose sizes of a Ray of its own Ray would refuse here, by RAY_ADDRESS."""
    folder = tmp_path / "run"
    with closing(Loopback(ray_dir)) as nodes:
        nodes.add(accelerators=2)
        lost = nodes.add(accelerators=1)
        overrides = on(
            nodes,
            [
                *small(task, folder, ray_dir),
                "rollout.n_gpus_per_node=2",
                "actor_rollout_ref.rollout.agent.num_workers=2",
                "reward.num_workers=2",
                "async_training.max_replica_restarts=1",
                f"trainer.total_training_steps={ENDLESS}",
            ],
        )
        with drilled(FULLY_ASYNC, overrides, folder, before=joining(nodes)) as run:
            run.wait_for_steps(2)
            assert (newest(run, LIVE), newest(run, AGENTS)) == (2, 2)
            log = [f"{RAY_FOLDER}={nodes.folder}"]
            nodes.kill(lost)
            run.wait_for(lambda: newest(run, LIVE) == 1, "the loss of a replica")
            run.wait_for(lambda: "tried again at each weight sync" in trainer_log(log), "an attempt in vain")
            nodes.add(accelerators=1)
            run.wait_for(lambda: newest(run, LIVE) == 2, "a replica on the new node")
            run.wait_for_steps(2)
            assert newest(run, AGENTS) == 2
            run.signal("main", signal.SIGTERM)
            ended = run.end_within(END_S)
    assert ended.returncode == 128 + signal.SIGTERM, ended.output[-3000:]
    assert ended.summary["error"] is None
    ledger = ended.summary["ledger"]
    assert ledger["issued"] == sum(ledger[key] for key in ("trained", "filtered", "failed", "live"))
    assert ledger["trained"] == 4 * ended.summary["steps"] and ledger["failed"] == 0
    assert ended.metrics[-1]["fully_async/count/restarts"] == 1
    assert "num_cpus, num_gpus, object_store_memory" in ended.output

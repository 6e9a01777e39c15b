# SPDX-License-Identifier: Apache-2.0
"""A cluster that exists is joined by a submitted job; tests/e2e/test_nodes.py joins one by RAY_ADDRESS."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from main_runs import small
from ray_nodes import Loopback, Nodes, closing

from recipe.async_engine.task import TaskPaths

RUN_S, UP_S = 900.0, 120.0
STEPS = 3


def overrides(task: TaskPaths, folder: Path, ray_dir: Path) -> list[str]:
    """With a preset, which describes a Ray of its own; agent loops and rewards on both nodes."""
    given = [item for item in small(task, folder, ray_dir) if "_temp_dir" not in item]
    workers = ["actor_rollout_ref.rollout.agent.num_workers=2", "reward.num_workers=2"]
    return [*given, *workers, f"trainer.total_training_steps={STEPS}"]


def run(command: list[str], nodes: Nodes, folder: Path, unless: str) -> str:
    """What a command says that ends well; one that ends with the words ``unless`` is run again, for a while."""
    deadline = time.monotonic() + UP_S
    while True:
        done = subprocess.run(
            command,
            cwd=folder,
            env=nodes.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        if unless not in done.stdout or time.monotonic() > deadline:
            break
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def as_a_job(nodes: Nodes, task: TaskPaths, folder: Path, ray_dir: Path) -> None:
    """`ray job submit`, which sets RAY_ADDRESS for its command, with variables of the job's own."""
    main = [sys.executable, "-m", "recipe.one_step_off.main", *overrides(task, folder, ray_dir)]
    ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": nodes.environment["PYTHONPATH"]}
    settings = f"--runtime-env-json={json.dumps({'env_vars': variables})}"
    command = [*ray, "job", "submit", f"--address={nodes.dashboard_address}", settings, "--", *main]
    # A node may be up a while before its agent is.
    said = run(command, nodes, folder, unless="No available agent to submit job")
    assert "leaves out num_cpus, num_gpus, object_store_memory" in said


@pytest.mark.e2e
@pytest.mark.slow
def test_a_submitted_job_with_a_preset_trains_on_a_cluster_of_two_nodes(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    with closing(Loopback(ray_dir, forked=False, dashboard=True)) as nodes:
        for _ in range(2):
            nodes.add(accelerators=1)
        as_a_job(nodes, task, tmp_path, ray_dir)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["mode"], summary["error"], summary["steps"]) == ("one_step_off", None, STEPS)

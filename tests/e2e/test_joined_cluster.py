# SPDX-License-Identifier: Apache-2.0
"""A cluster that exists is joined in each way that Ray has: as a submitted job, by address=auto, by a stock main."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from main_process import short_run
from main_runs import small
from published import GRPO_GSM8K, SCALED_DOWN
from ray_nodes import Loopback, Nodes, closing

from recipe.laptop.choice import CPU_ENVIRONMENT
from recipe.laptop.task import TaskPaths
from recipe.mains.register import VARIABLE

RUN_S, UP_S = 900.0, 120.0
STEPS = 3


def overrides(task: TaskPaths, folder: Path, ray_dir: Path) -> list[str]:
    """With a preset, which describes a Ray of its own; agent loops and rewards on both nodes."""
    given = [item for item in small(task, folder, ray_dir) if "_temp_dir" not in item]
    workers = ["actor_rollout_ref.rollout.agent.num_workers=2", "reward.num_workers=2"]
    return [*given, *workers, f"trainer.total_training_steps={STEPS}"]


def run(command: list[str], nodes: Nodes, folder: Path, unless: str = "no such words", **environment: str) -> str:
    """What a command says that ends well; one that ends with the words ``unless`` is run again, for a while."""
    deadline = time.monotonic() + UP_S
    while True:
        done = subprocess.run(
            command,
            cwd=folder,
            env=nodes.environment | environment,
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


def by_the_setting(nodes: Nodes, task: TaskPaths, folder: Path, ray_dir: Path) -> None:
    command = [*overrides(task, folder, ray_dir), "ray_kwargs.ray_init.address=auto", "trainer.nnodes=2"]
    run([sys.executable, "-m", "recipe.partial_rollout.main", *command], nodes, folder)


def by_a_stock_main(nodes: Nodes, task: TaskPaths, folder: Path, ray_dir: Path) -> None:
    """It hands everything to ray.init, so what a preset says of a Ray of its own is taken back.

    Nor does it take the platform to the workers of a cluster.
    """
    command = [
        *GRPO_GSM8K,
        "+recipe=fully_async",
        *SCALED_DOWN,
        *(item for item in short_run(task, folder, ray_dir) if "_temp_dir" not in item),
        *(f"ray_kwargs.ray_init.{name}=null" for name in ("num_cpus", "num_gpus", "object_store_memory")),
        *(f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in CPU_ENVIRONMENT.items()),
        f"trainer.total_training_steps={STEPS}",
    ]
    main = [sys.executable, "-m", "verl.trainer.main_ppo"]
    run([*main, *command], nodes, folder, RAY_ADDRESS=nodes.ray_address, **{**CPU_ENVIRONMENT, VARIABLE: "1"})


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "join"),
    [("one_step_off", as_a_job), ("partial_rollout", by_the_setting), ("fully_async", by_a_stock_main)],
)
def test_a_mode_trains_on_a_cluster_of_two_nodes_that_it_joins(
    mode: str, join: Callable[..., None], task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    with closing(Loopback(ray_dir, forked=False, dashboard=join is as_a_job)) as nodes:
        for _ in range(2):
            nodes.add(accelerators=1)
        join(nodes, task, tmp_path, ray_dir)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["mode"], summary["error"], summary["steps"]) == (mode, None, STEPS)

# SPDX-License-Identifier: Apache-2.0
"""A cluster that exists is joined in each way that Ray has: as a submitted job, by address=auto, by a stock main."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from main_process import short_run
from main_runs import small
from published import GRPO_GSM8K, SCALED_DOWN
from ray_nodes import Loopback, Nodes, closing

from recipe.async_engine.flags.register import VARIABLE
from recipe.async_engine.platform.detect import CPU_ENVIRONMENT
from recipe.async_engine.task import TaskPaths

RUN_S = 900.0
STEPS = 3


def overrides(task: TaskPaths, folder: Path, ray_dir: Path) -> list[str]:
    """With a preset, which describes a Ray of its own; agent loops and rewards on both nodes."""
    given = [item for item in small(task, folder, ray_dir) if "_temp_dir" not in item]
    workers = ["actor_rollout_ref.rollout.agent.num_workers=2", "reward.num_workers=2"]
    return [*given, *workers, f"trainer.total_training_steps={STEPS}"]


def run(nodes: Nodes, command: list[str], folder: Path, **environment: str) -> str:
    """What a command says that ends well."""
    given = {name: value for name, value in nodes.environment.items() if name != "RAY_ADDRESS"} | environment
    done = subprocess.run(
        command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def check(folder: Path, mode: str) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["mode"], summary["error"], summary["steps"]) == (mode, None, STEPS)


@pytest.mark.e2e
@pytest.mark.slow
def test_each_mode_joins_a_cluster_in_another_way(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    places = {mode: tmp_path / mode for mode in ("one_step_off", "partial_rollout", "fully_async")}
    for place in places.values():
        place.mkdir()
    with closing(Loopback(ray_dir, forked=False, dashboard=True)) as nodes:
        nodes.add(accelerators=1)
        nodes.add(accelerators=1)

        folder = places["one_step_off"]
        main = [sys.executable, "-m", "recipe.one_step_off.main", *overrides(task, folder, ray_dir)]
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": nodes.environment["PYTHONPATH"]}
        settings = f"--runtime-env-json={json.dumps({'env_vars': variables})}"
        said = run(
            nodes, [*ray, "job", "submit", f"--address={nodes.dashboard_address}", settings, "--", *main], tmp_path
        )
        check(folder, "one_step_off")
        assert "leaves out num_cpus, num_gpus, object_store_memory" in said

        folder = places["partial_rollout"]
        command = [*overrides(task, folder, ray_dir), "ray_kwargs.ray_init.address=auto", "trainer.nnodes=2"]
        run(nodes, [sys.executable, "-m", "recipe.partial_rollout.main", *command], tmp_path)
        check(folder, "partial_rollout")

        # verl's own main hands everything to ray.init, so what a preset says of a Ray of its own is taken back.
        folder = places["fully_async"]
        joined = [item for item in short_run(task, folder, ray_dir) if "_temp_dir" not in item]
        joined += [f"ray_kwargs.ray_init.{name}=null" for name in ("num_cpus", "num_gpus", "object_store_memory")]
        command = [*GRPO_GSM8K, "+recipe=fully_async", *SCALED_DOWN, *joined, f"trainer.total_training_steps={STEPS}"]
        # Nor does it take the platform to the workers of a cluster.
        given = {**CPU_ENVIRONMENT, VARIABLE: "1"}
        command += [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in given.items()]
        main = [sys.executable, "-m", "verl.trainer.main_ppo"]
        run(nodes, [*main, *command], tmp_path, RAY_ADDRESS=nodes.ray_address, **given)
        check(folder, "fully_async")

# SPDX-License-Identifier: Apache-2.0
"""What a run cannot do without dies while it waits for something else: it ends in time, and says what it was."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from drilled_run import KILL, TITLES, drilled, title
from main_runs import FULLY_ASYNC, small
from ray.cluster_utils import Cluster

from recipe.async_engine.run.heartbeat import CONTROL_S
from recipe.async_engine.task import TaskPaths

logger = logging.getLogger(__name__)

END_S = 60.0


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_death_of_rays_control_process_ends_the_run(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    folder = tmp_path / "run"
    overrides = [*small(task, folder, ray_dir), "trainer.total_training_steps=100000"]
    with drilled(FULLY_ASYNC, overrides, folder) as run:
        run.wait_for_steps(2)
        run.signal("control process", KILL)
        ended = run.end_within(CONTROL_S + END_S)
    assert ended.returncode == 1
    error = ended.summary["error"]
    assert error["name"] in ("ControlProcessLost", "ProcessLost")
    assert "control process" in error["message"]


@pytest.fixture
def cluster(ray_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head without an accelerator, and two nodes with a logical one each."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    # Ray notes there that this machine has a cluster, for everyone who starts one meanwhile to join.
    monkeypatch.setenv("RAY_TMPDIR", str(ray_dir))
    (ray_dir / "ray").mkdir()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 20, "num_gpus": 0, "temp_dir": str(ray_dir)})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=20, num_gpus=1, object_store_memory=10**9)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_loss_of_the_node_with_the_trainers_rank_ends_the_run(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster is joined with a preset, by the setting without ``+``."""
    folder = tmp_path / "run"
    overrides = [
        *small(task, folder, ray_dir),
        f"ray_kwargs.ray_init.address={cluster.address}",
        "trainer.total_training_steps=100000",
    ]
    with drilled(FULLY_ASYNC, overrides, folder) as run:
        run.wait_for(lambda: len(run.steps()) >= 2, "two steps", timeout_s=540)
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        (lost,) = [
            node
            for raylet, node in raylets.items()
            for process in psutil.Process(raylet).children(recursive=True)
            if title(process).startswith(TITLES["training worker"])
        ]
        began = time.time()
        cluster.remove_node(lost, allow_graceful=False)
        status = run.process.wait(END_S)
        logger.info("%.1f s from the kill to the end", time.time() - began)
    assert status == 1, run.said()[-3000:]
    error = json.loads((folder / "summary.json").read_text())["error"]
    assert error["name"] == "PartLost"
    assert error["message"].startswith("training worker 0 (")
    assert f"RunFailed: PartLost: {error['message']}" in run.said()

# SPDX-License-Identifier: Apache-2.0
"""What a run cannot do without dies while it waits for something else: it ends in time, and says what it was."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
from drilled_run import KILL, drilled
from main_runs import FULLY_ASYNC, small
from ray_nodes import Loopback, closing

from recipe.async_engine.core.deadlines import CONTROL_S
from recipe.laptop.task import TaskPaths

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
    assert error["name"] == "CannotGoOn"
    assert "control process" in error["message"]


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_loss_of_the_node_with_the_trainers_rank_ends_the_run(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    """A cluster is joined with a preset, by the setting without ``+``. The main's node has no accelerator."""
    folder = tmp_path / "run"
    with closing(Loopback(ray_dir, forked=False)) as nodes:
        nodes.add(accelerators=0)
        others = [nodes.add(accelerators=1) for _ in range(2)]
        overrides = [
            *(item for item in small(task, folder, ray_dir) if "_temp_dir" not in item),
            f"ray_kwargs.ray_init.address={nodes.ray_address}",
            "trainer.total_training_steps=100000",
        ]
        with drilled(FULLY_ASYNC, overrides, folder) as run:
            run.wait_for(lambda: len(run.steps()) >= 2, "two steps", timeout_s=540)
            (lost,) = [node for node in others if node.processes("training worker")]
            began = time.time()
            nodes.kill(lost)
            status = run.process.wait(END_S)
            logger.info("%.1f s from the kill to the end", time.time() - began)
    assert status == 1, run.said()[-3000:]
    error = json.loads((folder / "summary.json").read_text())["error"]
    assert error["name"] == "CannotGoOn"
    assert error["message"].startswith("training worker 0 (")
    assert f"RunFailed: CannotGoOn: {error['message']}" in run.said()

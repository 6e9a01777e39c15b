# SPDX-License-Identifier: Apache-2.0
"""Two nodes that are like containers on two hosts: what they share, and the end of a run when they are cut apart.

Each node has network, process, mount and IPC namespaces of its own. The main, the trainer and Ray's control process are
on one of them; of the training worker and the rollout server one is on the other.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from drilled_run import drilled
from main_runs import FULLY_ASYNC, small
from ray_nodes import Containers, closing, shares_memory

from recipe.laptop.task import TaskPaths

logger = logging.getLogger(__name__)

SILENT_S = 65.0
"""Until Ray's control process gives a silent node up: five health checks of 10 s, and 3 s between two."""
SLACK_S = 60.0


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_run_whose_nodes_cannot_reach_each_other_ends_in_time_and_shares_no_memory_before(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    folder = tmp_path / "run"
    with closing(Containers(ray_dir)) as nodes:
        near, far = nodes.add(accelerators=1), nodes.add(accelerators=1)
        overrides = [
            *(item for item in small(task, folder, ray_dir) if "_temp_dir" not in item),
            f"ray_kwargs.ray_init.address={nodes.ray_address}",
            "trainer.total_training_steps=100000",
            "async_training.timeouts.heartbeat=15",
        ]
        with drilled(FULLY_ASYNC, overrides, folder, before=nodes.inside(near)) as run:
            run.wait_for(lambda: len(run.steps()) >= 3, "three steps", timeout_s=540)
            assert near.processes("trainer")
            lost = [part for part in ("training worker", "rollout server") if far.processes(part)]
            # The versions of three steps have come: through gloo, though boot and user are the same on both.
            (receiver,) = [*near.processes("weight receiver"), *far.processes("weight receiver")]
            assert not shares_memory(receiver)
            began = time.monotonic()
            nodes.cut(far)
            status = run.process.wait(SILENT_S + SLACK_S)
            logger.info("%s cut off: %.0f s to the end", lost, time.monotonic() - began)
            said = run.said()
    assert status == 1, said[-3000:]
    assert lost
    last = next(line for line in reversed(said.splitlines()) if "RunFailed: " in line)
    logger.info("%s", last)
    assert "CannotGoOn: " in last or "NoReplicaLeft: " in last, last

# SPDX-License-Identifier: Apache-2.0
"""A replica of two accelerators, tensor parallel: both parts of its engine have the weights of each version."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, run_main, small
from test_experts import PARTIAL_ROLLOUT, check_exact
from test_fully_async import DECOUPLED

from recipe.laptop.task import TaskPaths

STEPS = 4


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "own"),
    [
        (FULLY_ASYNC, ["async_training.weights.staging=device"]),
        (FULLY_ASYNC, ["async_training.weights.staging=host"]),
        (PARTIAL_ROLLOUT, ["trainer.n_gpus_per_node=2"]),
    ],
    ids=["staged on the device", "staged in host memory", "loaded in place"],
)
def test_both_parts_of_a_replica_have_the_weights_of_each_version(
    main: str, own: list[str], untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    places = ["rollout.n_gpus_per_node=2"] if main == FULLY_ASYNC else []
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        *own,
        *places,
        DECOUPLED,
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=mp",
        "async_training.staleness_threshold=0",
        "async_training.max_staleness=0",
        f"trainer.total_training_steps={STEPS}",
    ]
    check_exact(run_main(main, overrides, tmp_path), STEPS, bound=0)

# SPDX-License-Identifier: Apache-2.0
"""A policy of the user's own, named in the configuration: the bound and the books hold whatever it wants."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, run_main, small
from test_fully_async import check_books

from recipe.laptop.task import TaskPaths


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_by_a_policy_of_ones_own_keeps_its_bound_and_trains_each_prompt_once(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    steps = 6
    overrides = [
        *small(task, tmp_path, ray_dir),
        "async_training.admission_policy=newest_policy.Newest",
        "async_training.max_staleness=2",
        "async_training.trigger_parameter_sync_step=1",
        f"trainer.total_training_steps={steps}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_books(run, steps=steps, bound=2)

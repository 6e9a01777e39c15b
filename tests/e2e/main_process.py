# SPDX-License-Identifier: Apache-2.0
"""A main as a process of its own, and what every short run of one is told; for tests and benchmarks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from surroundings import shared_forks

from recipe.async_engine.task.settings import TaskPaths

FORKS = "ray_kwargs.ray_init.runtime_env.py_executable"


def forked(overrides: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The overrides of a run whose workers are forks of a shared process."""
    return [*overrides, f"{FORKS}={shared_forks(environment).executable}"]


def run_module(
    main: str, overrides: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """``python -m main overrides`` in ``folder``, to its end; standard error is in its output."""
    return subprocess.run(
        [sys.executable, "-m", main, *overrides],
        env=dict(environment),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def short_run(task: TaskPaths, folder: Path, ray_dir: Path) -> list[str]:
    """Overrides for a run on ``task`` that does not validate and writes below ``folder`` only.

    ``ray_dir`` must be short: a socket path below it has at most 107 bytes.
    """
    return [
        f"data.train_files={task.train}",
        f"data.val_files={task.val}",
        f"actor_rollout_ref.model.path={task.model}",
        f"reward.custom_reward_function.path={task.reward_file}",
        "reward.custom_reward_function.name=compute_score",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={folder}",
        f"hydra.run.dir={folder}/hydra",
        f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
    ]

# SPDX-License-Identifier: Apache-2.0
"""A main as a process of its own, and what every short run of one is told; for tests and benchmarks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipe.laptop.task.settings import TaskPaths

FORKS = "ray_kwargs.ray_init.runtime_env.py_executable"


def run_module(
    main: str,
    overrides: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    forks: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python -m main overrides`` in ``folder``, to its end; standard error is in its output.

    Args:
        forks: what makes forks in place of interpreters (`Prefork.executable`), for the main and what Ray starts.
    """
    command = [sys.executable, "-m", main]
    if forks is not None:
        command = [str(forks), "-m", "forked_main", str(forks), main]
        overrides = [*overrides, f"{FORKS}={forks}"]
    return subprocess.run(
        [*command, *overrides],
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

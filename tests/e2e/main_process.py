# SPDX-License-Identifier: Apache-2.0
"""Runs a main as a process, with the overrides that all short runs need; for tests and benchmarks."""

from __future__ import annotations

import re
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
    """Run ``python -m main overrides`` in ``folder`` to its end; standard error is included in the output.

    Args:
        forks: executable that forks instead of starting interpreters (`Prefork.executable`), for the main and for Ray.
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


def last_words(run: subprocess.CompletedProcess[str]) -> str:
    """Return what a test prints of a run that failed: the stacks of processes that crashed, then the output's end."""
    crashes = re.findall(r"(?m)^.*(?:\*\*\* SIG|Fatal Python error|terminate called).*(?:\n.*){0,30}", run.stdout)
    return "\n".join([*crashes, run.stdout[-8000:]])


def short_run(task: TaskPaths, folder: Path, ray_dir: Path) -> list[str]:
    """Return overrides for a run on ``task`` that does not validate and writes only below ``folder``.

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

# SPDX-License-Identifier: Apache-2.0
"""A main as a process of its own, and what every short run of one is told; for tests and benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipe.async_engine.features import FEATURES
from recipe.async_engine.prefork.run import EXECUTABLE_VARIABLE, Prefork
from recipe.async_engine.task.settings import TaskPaths

FORKS = "ray_kwargs.ray_init.runtime_env.py_executable"
_servers: dict[tuple[str | None, ...], Prefork] = {}


def with_helpers(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which the modules of this folder can be named in overrides."""
    path = filter(None, [str(Path(__file__).parent), environment.get("PYTHONPATH")])
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def shared_forks(environment: Mapping[str, str]) -> Prefork:
    """The process that has imported the stack for all runs in such an environment; made for the first of them.

    A run has one of its own otherwise, and its first 15 seconds of CPU time. `end_shared_forks` ends them all.
    """
    # What is imported once must have read nothing that differs between runs.
    names = [*sorted(variable for variable, _, _ in FEATURES), "PYTHONPATH", "VERL_USE_EXTERNAL_MODULES"]
    key = tuple(environment.get(name, os.environ.get(name)) for name in names)
    if key not in _servers:
        _servers[key] = Prefork(environment)
    return _servers[key]


def end_shared_forks() -> None:
    while _servers:
        _servers.popitem()[1].stop()


def forked(overrides: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The overrides and the environment of a run whose workers are forks of a shared process."""
    executable = str(shared_forks(environment).executable)
    return [*overrides, f"{FORKS}={executable}"], {**environment, EXECUTABLE_VARIABLE: executable}


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

# SPDX-License-Identifier: Apache-2.0
"""What a main program does in addition for a run without an accelerator.

It chooses the platform, creates the built-in task, and starts a fork server for worker processes. Contract: this module
does not affect a run on accelerators, unless the run's configuration asks for the built-in task.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import asdict

import ray
from omegaconf import DictConfig, open_dict

from recipe.async_engine.run.detect import PlatformChoice
from recipe.async_engine.run.driver import RunFailed
from recipe.async_engine.supported import RAY_SUPPORTED, is_supported
from recipe.laptop import engines
from recipe.laptop.choice import choose_platform
from recipe.laptop.prefork.run import MODULES, Prefork
from recipe.laptop.task import TaskDirectoryError, TaskSettings, ensure_task

__all__ = ["choose_platform", "fill_builtin_task", "forks"]

logger = logging.getLogger(__name__)

TASK_TIMEOUT_S = 300.0


def fill_builtin_task(config: DictConfig) -> None:
    """Create the built-in task if ``config`` asks for it, and fill in its paths where ``config`` has null.

    These are the paths of the model, the data files and the reward function.
    """
    task = config.get("builtin_task")
    if task is None or (config.data.train_files and config.actor_rollout_ref.model.path):
        return
    folder = task.dir or os.path.join(config.trainer.default_local_dir, "task")
    settings = TaskSettings(task.seed, lengths=task.lengths, train_size=task.train_size, val_size=task.val_size)
    _make_task(folder, settings)
    paths = ensure_task(folder, settings)
    with open_dict(config):
        if not config.actor_rollout_ref.model.path:
            config.actor_rollout_ref.model.path = str(paths.model)
        if not config.data.train_files:
            config.data.train_files = str(paths.train)
            if not config.data.val_files:
                config.data.val_files = str(paths.val)
            reward = config.reward.custom_reward_function
            if not reward.path:
                reward.path, reward.name = str(paths.reward_file), "compute_score"
                reward.reward_kwargs = {"permute": bool(task.permute_rewards)}


def _make_task(folder: str, settings: TaskSettings) -> None:
    """Create the built-in task in a separate process, so that this process need not import torch, which takes long.

    Raise TaskDirectoryError if the folder cannot be used, and RunFailed for any other failure.
    """
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(settings).items()]
    command = [sys.executable, "-m", "recipe.laptop.task", f"--out={folder}", *options]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TASK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the built-in task was not created in {folder} within {TASK_TIMEOUT_S:g} s: retry") from None
    said = done.stderr.strip()
    if done.returncode == 2:  # `recipe.laptop.task` exits with status 2 for TaskDirectoryError.
        raise TaskDirectoryError(said)
    if done.returncode:
        raise RunFailed(f"the built-in task was not created in {folder}: {said or 'its process gave no reason'}")


def forks(config: DictConfig, choice: PlatformChoice) -> Prefork | None:
    """Start and return a fork server for Ray's workers; None if the run is not to use one or cannot use one."""
    asked = choice.is_cpu and config.async_training.prefork_workers
    if not asked or sys.platform != "linux":
        return None
    if not is_supported(ray.__version__, RAY_SUPPORTED):
        logger.warning(
            "async_training.prefork_workers has no effect with ray %s (written for %s): workers start without it",
            ray.__version__,
            RAY_SUPPORTED,
        )
        return None
    return Prefork(modules=(*MODULES, *engines.MODULES.get(config.actor_rollout_ref.rollout.name, ())))

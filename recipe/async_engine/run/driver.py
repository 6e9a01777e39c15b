# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What every mode's main does: check, start Ray, run, record.

Contract: a configuration that cannot run is refused before any process starts. A run that fails ends with the error
and its traceback on standard error, a non-zero exit status and a summary that names the error. This process imports
neither torch nor verl on the CPU platform: start-up is bound by imports.
"""

import logging
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.exceptions import RayActorError

from recipe.async_engine.config.inspect import check
from recipe.async_engine.core.config import RunPlan
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.outside import Resources
from recipe.async_engine.platform.detect import (
    LOCAL_RAY_ADDRESS,
    PlatformChoice,
    apply_environment,
    choose_platform,
    inspect_machine,
)
from recipe.async_engine.platform.versions import RAY_SUPPORTED, is_supported
from recipe.async_engine.prefork.run import Prefork
from recipe.async_engine.run.display import Display
from recipe.async_engine.run.ending import EndAtOnce, EndingOnSignal, StartedProcesses
from recipe.async_engine.run.events import take_in
from recipe.async_engine.run.memory import MemoryMeter
from recipe.async_engine.run.record import RunRecord
from recipe.async_engine.run.runner import TaskRunner
from recipe.async_engine.run.stall import STALL_FILE, Stalled
from recipe.async_engine.shadowing import check_not_shadowed

logger = logging.getLogger(__name__)

TASK_TIMEOUT_S = 300.0


class RunFailed(RecipeError):
    """The run ended with an error, which has been shown."""


def main(config: DictConfig, mode: str, trainer_class: str) -> None:
    """Run ``config``; exit with status 1 if it cannot run or fails, with 128 + signal if one ended it."""
    try:
        summary = run(config, mode, trainer_class, began=psutil.Process().create_time())
    except RecipeError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        sys.exit(1)
    except EndAtOnce as end:
        sys.exit(end.status)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if summary["stopped_by"] is not None:
        sys.exit(128 + signal.Signals[summary["stopped_by"]])


def run(config: DictConfig, mode: str, trainer_class: str, began: float | None = None) -> dict[str, Any]:
    """Run ``config``; returns the summary. Times count from ``began`` (seconds since the epoch), by default from now.

    Raises:
        ShadowedPackageError: another package has the name of one of the modes.
        ConfigError: the configuration cannot run.
        RunFailed: the run ended with an error.
    """
    began = time.time() if began is None else began
    check_not_shadowed()
    choice = choose_platform(os.environ, inspect_machine(), config.ray_kwargs.ray_init.get("address"))
    apply_environment(choice)
    with open_dict(config):
        config.trainer.default_local_dir = os.path.abspath(config.trainer.default_local_dir)
        if choice.is_cpu:
            config.trainer.device = "cpu"
    _fill_builtin_task(config)
    plan = check(config)
    record = RunRecord(config.trainer.default_local_dir, mode, began)
    Path(config.trainer.default_local_dir, STALL_FILE).unlink(missing_ok=True)
    meter = MemoryMeter()
    # Ray's own processes included, unless they are a cluster's or the caller's.
    started = StartedProcesses() if _starts_ray(config) else None
    display = None
    prefork = None
    failed: BaseException | None = None
    try:
        if _may_fork(config, choice):
            prefork = Prefork(choice.environment)
        _start_ray(config, choice, prefork)
        if config.ray_kwargs.ray_init.get("address"):
            check(config, available=Resources(accelerators=int(ray.cluster_resources().get("GPU", 0))))
        display = _follow(config, plan, mode, trainer_class, record)
    except BaseException as error:
        failed = error
        record.fail(error)
        raise
    finally:
        summary = record.close(meter.stop())
        if started is not None:
            started.look()
        ray.shutdown()
        if prefork is not None:
            prefork.stop()
        if started is not None and (killed := started.end()):
            logger.warning("%d processes of the run did not end by themselves and were killed", len(killed))
        if display is not None:
            display.end(summary)
    if summary["error"] is not None and failed is None:
        raise RunFailed(f"{summary['error']['name']}: {summary['error']['message']}")
    return summary


def _follow(config: DictConfig, plan: RunPlan, mode: str, trainer_class: str, record: RunRecord) -> Display:
    """Start the trainer's actor and take in what it yields until it ends."""
    runner = ray.remote(TaskRunner).options(num_cpus=1, max_concurrency=2).remote()
    events = runner.run.options(num_returns="streaming").remote(
        OmegaConf.to_container(config, resolve=True), trainer_class
    )
    display = Display(mode, plan.total_steps)
    # Every wait inside the run has a deadline of its own, and the death of the actor ends the iteration.
    with EndingOnSignal(runner.stop.remote, plan.settings.async_training.timeouts.stop):
        try:
            for reference in events:
                take_in(ray.get(reference, timeout=TASK_TIMEOUT_S), record, display)
        except RayActorError as error:
            stalled = _stalled(config)
            if stalled is None:
                raise
            raise stalled from error
    return display


def _stalled(config: DictConfig) -> Stalled | None:
    """Why the trainer's process ended itself, if it did."""
    report = Path(config.trainer.default_local_dir) / STALL_FILE
    return Stalled(report.read_text().rstrip()) if report.exists() else None


def _fill_builtin_task(config: DictConfig) -> None:
    """Make the built-in task if the configuration has it, and fill the paths that are null."""
    from recipe.async_engine.task import TaskSettings, ensure_task

    task = config.get("builtin_task")
    if task is None or (config.data.train_files and config.actor_rollout_ref.model.path):
        return
    folder = task.dir or os.path.join(config.trainer.default_local_dir, "task")
    settings = TaskSettings(task.seed, task.family, task.lengths, task.train_size, task.val_size)
    # In a process of its own: making the task imports torch, which this process has no other use for.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        paths = pool.submit(ensure_task, folder, settings).result(TASK_TIMEOUT_S)
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


def _starts_ray(config: DictConfig) -> bool:
    """Whether this run starts a Ray of its own, instead of using the caller's or joining a cluster."""
    return config.ray_kwargs.ray_init.get("address") in (None, LOCAL_RAY_ADDRESS) and not ray.is_initialized()


def _may_fork(config: DictConfig, choice: PlatformChoice) -> bool:
    """Whether this run's workers are to be forked from one process that has imported the stack."""
    asked = choice.is_cpu and _starts_ray(config) and config.async_training.prefork_workers
    if not asked or sys.platform != "linux":
        return False
    if not is_supported(ray.__version__, RAY_SUPPORTED):
        logger.warning(
            "async_training.prefork_workers has no effect with ray %s (written for %s): workers start from scratch",
            ray.__version__,
            ", ".join(RAY_SUPPORTED),
        )
        return False
    return True


def _start_ray(config: DictConfig, choice: PlatformChoice, prefork: Prefork | None) -> None:
    """Start Ray, or join the cluster that is named; the platform travels to every worker by ``runtime_env``."""
    if ray.is_initialized():
        return
    arguments = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    if _starts_ray(config) and arguments.get("include_dashboard") is False:
        # Events of tasks are for the dashboard; Ray's control process keeps them, 100 MiB for 1,000 small steps.
        arguments["_system_config"] = {"task_events_report_interval_ms": 0} | (arguments.get("_system_config") or {})
    if choice.is_cpu:
        defaults: dict[str, Any] = {"env_vars": dict(choice.environment)}
    else:
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        defaults = get_ppo_ray_runtime_env(config)
    # verl's configuration has a py_executable of null.
    given = {key: value for key, value in (arguments.pop("runtime_env", None) or {}).items() if value is not None}
    forks = {} if prefork is None else prefork.runtime_env
    layers = (defaults, forks, given)
    environment = {name: value for layer in layers for name, value in layer.get("env_vars", {}).items()}
    ray.init(**arguments, runtime_env={**defaults, **forks, **given, "env_vars": environment})
    if prefork is not None:
        prefork.joined(ray.get_runtime_context().get_job_id())

# SPDX-License-Identifier: Apache-2.0
"""Starts Ray, or joins a Ray cluster, with the settings that the run needs.

Contract: a start of Ray may take up to ``async_training.timeouts.startup`` seconds. The paths of Ray's sockets are
short enough for Linux, even if the user has chosen a folder with a long path. Shown by
tests/integration/test_ray_start.py, test_joining.py and test_profiled.py.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import psutil
import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray._private import services
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

from recipe.async_engine.actors.sockets import short, usable
from recipe.async_engine.core.deadlines import RAY_PORT_S
from recipe.async_engine.run.detect import LOG_LEVEL, PlatformChoice
from recipe.async_engine.run.shutdown import StartedProcesses

logger = logging.getLogger(__name__)

FOLDERS = ("RAY_TMPDIR", "TMPDIR")
"""Environment variables with the folders in which Ray, engines, multiprocessing and this package create files and
sockets."""
RESOURCES = (
    "num_cpus",
    "num_gpus",
    "resources",
    "labels",
    "object_store_memory",
    "_system_config",
    "_enable_object_reconstruction",
    "_node_name",
)
"""Arguments of ray.init that describe the Ray node which ray.init starts if it does not join a cluster."""
ASK_AGAIN_S = 0.2
GIVEN_UP = ("timed out during startup", "Timed out waiting for file")
"""Texts in the error messages with which Ray gives up a start (ray/_private/node.py:440, :1407). The second text also
occurs if the Ray node ended during the start because the node's agents did not write their ports to files within 30 s.
"""


class Forks(Protocol):
    """Starts the workers of a local run as forks of one process, which has imported all modules beforehand."""

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Return the entry for Ray's ``runtime_env`` that makes workers forks of the preloaded process."""

    def joined(self, job_id: str) -> None:
        """Record that Ray has accepted the run as job ``job_id``."""

    def stop(self) -> None:
        """End the process from which the workers are forked. This is called after the run has ended."""


def shorten_folders(ray_init: DictConfig) -> None:
    """Set short paths for the folders that will contain sockets, for this process and those that it starts from now on.

    Raises:
        RecipeError: one of the folders is not writable. Ray's own error would not name the folder.
    """
    for name in FOLDERS:
        if given := os.environ.pop(name, None):
            os.environ[name] = short(usable(given, name))
    tempfile.tempdir = None
    if ray_init.get("_temp_dir"):
        setting = "ray_kwargs.ray_init._temp_dir"
        ray_init._temp_dir = short(usable(str(ray_init._temp_dir), setting))


def leave_out_resources(ray_init: DictConfig, cluster: str) -> None:
    """Remove the settings for starting a Ray node, because ray.init refuses them when it joins ``cluster``."""
    left_out = [name for name in RESOURCES if ray_init.pop(name, None) is not None]
    if left_out:
        names = ", ".join(left_out)
        logger.warning("%s: the run joins this cluster, so ray_kwargs.ray_init leaves out %s", cluster, names)


def take_environment(config: DictConfig) -> dict[str, str]:
    """Remove the environment variables for workers from the configuration, and return them.

    They may contain secrets, and the configuration is saved.
    """
    given = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True).get("runtime_env") or {}
    variables = given.get("env_vars") or {}
    if variables:
        with open_dict(config):
            config.ray_kwargs.ray_init.runtime_env.env_vars = {}
    taken = {str(name): str(value) for name, value in variables.items() if value is not None}
    loggers = OmegaConf.select(config, "trainer.logger")
    if "rl_insight" in ([loggers] if isinstance(loggers, str) else loggers or ()):
        # verl's main sets this variable too (verl/trainer/main_ppo.py:52); without it `rl_insight` shows nothing.
        taken.setdefault("VERL_RL_INSIGHT_ENABLE", "1")
    return taken


def under_nsight(config: DictConfig) -> dict[str, Any]:
    """Return the options with which Ray starts the trainer's actor under Nsight Systems; {} if that is not configured.

    Stock verl's main uses the same options (main_ppo.py:76).
    """
    profiler = config.global_profiler
    if config.trainer.device != "cuda" or profiler.tool != "nsys" or not profiler.steps:
        return {}
    options = OmegaConf.to_container(profiler.global_tool_config.nsys.controller_nsight_options, resolve=True)
    return {"runtime_env": {"nsight": options}}


def write_timeline(config: DictConfig) -> None:
    """Write the timeline of Ray's tasks to ``ray_kwargs.timeline_json_file`` if that is set, as stock verl does."""
    file = config.ray_kwargs.get("timeline_json_file")
    if file and ray.is_initialized():
        try:
            ray.timeline(filename=str(file))
        except Exception as error:  # the run is over and must not fail because of the timeline
            logger.warning("ray_kwargs.timeline_json_file=%s could not be written: %r", file, error)


def start_ray(
    config: DictConfig, choice: PlatformChoice, forks: Forks | None, given: Mapping[str, str], own: bool
) -> None:
    """Start Ray, or join a cluster. Ray's workers get the run's platform in ``runtime_env``.

    Args:
        given: environment variables for Ray's workers; empty if the workers inherit them from this process.
        own: whether Ray is started here, so that its processes inherit this process's environment.
    """
    if ray.is_initialized():
        return
    arguments = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    if own and arguments.get("include_dashboard") is False:
        # Only the dashboard uses task events. Without a dashboard, switch them off, because Ray's control process would
        # need 100 MiB for them after 1,000 small steps.
        arguments["_system_config"] = {"task_events_report_interval_ms": 0} | (arguments.get("_system_config") or {})
    if choice.is_cpu:
        defaults: dict[str, Any] = {"env_vars": {} if own else dict(choice.environment)}
    else:
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        defaults = get_ppo_ray_runtime_env(config)
        defaults["env_vars"] = LOG_LEVEL | dict(defaults.get("env_vars") or {})
    # Leave out settings that are null, such as py_executable in verl's configuration.
    asked = {key: value for key, value in (arguments.pop("runtime_env", None) or {}).items() if value is not None}
    forked = {} if forks is None else forks.runtime_env
    variables = _not_the_jobs(defaults.get("env_vars", {}) | dict(given))
    arguments["runtime_env"] = {**defaults, **forked, **asked, "env_vars": variables}
    if own:
        start_own(arguments, config.async_training.timeouts.startup)
    else:
        ray.init(**arguments)
    if forks is not None:
        forks.joined(ray.get_runtime_context().get_job_id())


def start_own(arguments: Mapping[str, Any], startup_s: float) -> None:
    """Call ``ray.init``. If Ray gives up starting its node, call it again, for up to ``startup_s`` seconds in total."""
    deadline = time.monotonic() + startup_s
    while True:
        started = StartedProcesses()
        try:
            with patience(max(0.0, deadline - time.monotonic())):
                ray.init(**arguments)
                return
        except Exception as error:  # Ray has no exception class for a start that it gives up
            if not any(words in str(error) for words in GIVEN_UP) or time.monotonic() >= deadline:
                raise
        logger.warning("Ray has given up its own start: it is started once more")
        started.look()
        started.end(grace_s=0)


@contextmanager
def patience(startup_s: float) -> Iterator[None]:
    """Inside the ``with`` block, let a start of Ray take ``startup_s`` seconds, which Ray's own limits would not allow.

    If Ray's node is not registered after a fixed 30 s, Ray gives up the start (ray/_private/node.py:428). This function
    therefore repeats Ray's query for the node until it succeeds, as long as the node's raylet lives. Ray's other limits
    are set by environment variables, which Ray's processes inherit.
    """
    asked, deadline = services.get_node, time.monotonic() + startup_s

    def get_node(*arguments: Any) -> Any:
        while True:
            try:
                return asked(*arguments)
            except RuntimeError:
                if time.monotonic() >= deadline or not _raylet_lives():
                    raise
            time.sleep(ASK_AGAIN_S)

    if startup_s:
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(int(min(startup_s, RAY_PORT_S))))
        os.environ.setdefault("RAY_agent_register_timeout_ms", str(int(1000 * startup_s)))
    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = asked


def _raylet_lives() -> bool:
    processes = psutil.Process().children()
    return any(p.name() == "raylet" and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def _not_the_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the variables that ``ray job submit --runtime-env-json`` has set.

    Ray refuses to set a variable twice.
    """
    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("runtime_env", {}).get("env_vars", {})
    return {name: value for name, value in environment.items() if name not in job}

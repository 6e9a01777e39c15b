# SPDX-License-Identifier: Apache-2.0
"""How a main starts Ray, or joins a cluster.

Contract: a Ray of the run's own has as long to start as the whole run has (``async_training.timeouts.startup``), and
its sockets have paths that Linux takes, however long the folder is that they are to be in. Shown by
tests/integration/test_ray_start.py.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from omegaconf import DictConfig, OmegaConf
from ray._private import services
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

from recipe.async_engine.actors.sockets import short, usable
from recipe.async_engine.run.detect import LOG_LEVEL, PlatformChoice
from recipe.async_engine.run.parts import Forks

logger = logging.getLogger(__name__)

FOLDERS = ("RAY_TMPDIR", "TMPDIR")
"""Variables that say where Ray, vLLM, multiprocessing and this package put files, sockets among them."""
ASK_AGAIN_S = 0.2
GIVEN_UP = ("timed out during startup", "Timed out waiting for file")
"""In Ray's messages (ray/_private/node.py:440, :1407), also where its node has ended: that gives its agents 30 s, by a
number in its code, to write their ports to files, and then aborts."""
LONGEST_S = 120
"""Ray's control process has at most that for its port in one start; one that has died would be waited for as long."""


def shorten_folders(ray_init: DictConfig) -> None:
    """Have the folders that sockets are put into, here and in processes that are started from now on, be short ones.

    Raises:
        UnusableFolder: nothing can be put into one of them; Ray would end with an error that does not name it.
    """
    for name in FOLDERS:
        if given := os.environ.pop(name, None):
            os.environ[name] = short(usable(given, name))
    tempfile.tempdir = None
    if ray_init.get("_temp_dir"):
        setting = "ray_kwargs.ray_init._temp_dir"
        ray_init._temp_dir = short(usable(str(ray_init._temp_dir), setting))


def start_ray(
    config: DictConfig, choice: PlatformChoice, forks: Forks | None, given: Mapping[str, str], own: bool
) -> None:
    """Start Ray, or join a cluster; the platform travels to a cluster's workers by ``runtime_env``.

    Args:
        given: environment variables for the workers, where they cannot inherit them.
        own: whether Ray is started here, so that its processes inherit this one's environment.
    """
    if ray.is_initialized():
        return
    arguments = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    if own and arguments.get("include_dashboard") is False:
        # Events of tasks are for the dashboard; Ray's control process keeps them, 100 MiB for 1,000 small steps.
        arguments["_system_config"] = {"task_events_report_interval_ms": 0} | (arguments.get("_system_config") or {})
    if choice.is_cpu:
        defaults: dict[str, Any] = {"env_vars": {} if own else dict(choice.environment)}
    else:
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        defaults = get_ppo_ray_runtime_env(config)
        defaults["env_vars"] = LOG_LEVEL | dict(defaults.get("env_vars") or {})
    # verl's configuration has a py_executable of null.
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
    """``ray.init`` with these arguments, again where Ray has given up the node that it starts, up to ``startup_s``."""
    deadline = time.monotonic() + startup_s
    before = set(psutil.Process().children())
    while True:
        try:
            with patience(max(0.0, deadline - time.monotonic())):
                ray.init(**arguments)
                return
        except Exception as error:  # Ray has no class for it
            if not any(words in str(error) for words in GIVEN_UP) or time.monotonic() >= deadline:
                raise
        logger.warning("Ray has given up its own start: it is started once more")
        begun = set(psutil.Process().children()) - before
        for process in [child for parent in begun for child in (*_below(parent), parent)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _below(parent: psutil.Process) -> list[psutil.Process]:
    try:
        return parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextmanager
def patience(startup_s: float) -> Iterator[None]:
    """A Ray that is started in it has so many seconds for that, where Ray's own limits are shorter.

    Ray gives the node that it starts 30 s to be known, by a number in its code (ray/_private/node.py:428): each time
    that it asks, the answer waits for the node, as long as there is still a process of it. Other limits are variables,
    which its processes inherit.
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
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(int(min(startup_s, LONGEST_S))))
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
    """Without what ``ray job submit --runtime-env-json`` has set already, which Ray refuses to be told twice."""
    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("runtime_env", {}).get("env_vars", {})
    return {name: value for name, value in environment.items() if name not in job}

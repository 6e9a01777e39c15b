# SPDX-License-Identifier: Apache-2.0
"""Environments, folders and Ray clusters for the programs that tests start."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from recipe.async_engine.outside import FEATURES
from recipe.laptop.choice import CPU_ENVIRONMENT
from recipe.laptop.prefork.run import Prefork

CHECKOUT = Path(__file__).parents[1]
_servers: list[Prefork] = []
_forks: dict[tuple[str | None, ...], Path] = {}


def with_helpers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which overrides and actors can name the tests' helpers and the examples."""
    inside = ("tests/e2e", "tests/integration", "tests", "examples", "benchmarks/emulation/plugin", "")
    folders = [str(CHECKOUT / folder) for folder in inside]
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    path = dict.fromkeys(filter(None, [*folders, *given]))
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def shared_forks(environment: Mapping[str, str]) -> Path:
    """Return an executable that forks the process which has imported the stack for all runs in such an environment.

    The process is started at the first call. Otherwise each run would start one of its own, which takes 15 seconds of
    CPU time. `end_shared_forks` ends all such processes.
    """
    key = _read_at_import(environment)
    if key not in _forks:
        _servers.append(Prefork(environment))
        _forks[key] = _servers[-1].executable
    return _forks[key]


def take_forks(executable: str) -> None:
    """Make the runs of nearly all tests fork through ``executable``, which another process of the tests owns."""
    _forks[_read_at_import(usual_environment())] = Path(executable)


def usual_environment() -> dict[str, str]:
    return with_helpers(user_environment())


def _read_at_import(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    """Return the environment that imports may read, so that only runs with equal values share a process."""
    names = [*sorted(variable for variable, _, _ in FEATURES), "PYTHONPATH", "VERL_USE_EXTERNAL_MODULES"]
    return tuple(environment.get(name, os.environ.get(name)) for name in names)


def end_shared_forks() -> None:
    _forks.clear()
    while _servers:
        _servers.pop().stop()


def user_environment() -> dict[str, str]:
    """Return this process's environment as in a user's shell, in which a program chooses its own platform."""
    return {name: value for name, value in os.environ.items() if name not in {*CPU_ENVIRONMENT, "RAY_ADDRESS"}}


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A folder for Ray's sockets, whose paths are limited to 107 bytes; pytest's folders are too deep."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_starts_forks(executable: str) -> Iterator[None]:
    """Make what `ray.init` starts here forks through ``executable``: Ray's own services and the first workers.

    Each would otherwise import the same packages, which takes a run some 8 seconds of CPU time.
    """
    import ray

    init = ray.init

    def forking(*arguments: Any, **settings: Any) -> Any:
        plain, sys.executable = sys.executable, executable
        try:
            return init(*arguments, **settings)
        finally:
            sys.executable = plain

    ray.init = forking
    try:
        yield
    finally:
        ray.init = init


@contextmanager
def fresh_ray(**settings: int) -> Iterator[None]:
    """A Ray of this process, with a folder of its own and ``settings`` of `ray.init`, which is stopped at the end.

    Its workers are forks of the process that the runs of end-to-end tests share.
    """
    import ray

    from recipe.async_engine.run.ray_start import start_own

    forks = shared_forks(usual_environment())
    with ray_folder() as folder, ray_starts_forks(str(forks)):
        ray.shutdown()  # Ray starts itself if an earlier test has called it without a cluster
        start = {
            "include_dashboard": False,
            "_temp_dir": str(folder),
            "log_to_driver": False,
            "runtime_env": {"py_executable": str(forks)},
        }
        start_own({**start, **settings}, 300.0)
        yield
        ray.shutdown()


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie that its parent has not reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

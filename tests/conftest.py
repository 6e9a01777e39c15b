# SPDX-License-Identifier: Apache-2.0
"""Loaded before every test module: selects the platform that a main would select here, and makes helpers importable.

The platform comes first because verl reads it once, when any module imports it. Test modules are imported by path, not
through `sys.path`, so the folders of their helpers are added to it.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from surroundings import end_shared_forks, shared_forks, take_forks, usual_environment

from recipe.async_engine.run.detect import inspect_machine
from recipe.laptop.choice import choose_platform
from recipe.laptop.task import TaskPaths, TaskSettings, ensure_task

ROOMS = ("core", "config", "plan", "integration", "e2e", "contracts", "gpu")
sys.path[:0] = [str(Path(__file__).parent / room) for room in ROOMS]
os.environ.update(choose_platform(os.environ, inspect_machine()).environment)

with suppress(ModuleNotFoundError):  # Hypothesis is missing on a cluster that runs `-m gpu`.
    # The duration of an example depends on how busy the machine is.
    settings = importlib.import_module("hypothesis").settings
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip other modules with ``-m gpu``: they import development tools, which a cluster lacks."""
    folder = Path(__file__).parent
    if config.option.markexpr.strip() != "gpu" or folder not in collection_path.parents:
        return None
    return True if collection_path.relative_to(folder).parts[0] != "gpu" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Make the processes among which xdist divides the tests forks of the shared process."""
    for spec in specs:
        spec.python = str(shared_forks(usual_environment()))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["forks"] = node.gateway.spec.python


@pytest.fixture(scope="session", autouse=True)
def quick_yaml() -> Iterator[None]:
    """Parse each configuration file once per process, because hundreds of tests compose the same ones."""
    parse, parsed = yaml.load, {}

    def load(stream: Any, Loader: Any) -> Any:
        text = stream.read() if hasattr(stream, "read") else stream
        if (text, Loader.__name__) not in parsed:
            parsed[text, Loader.__name__] = parse(text, Loader)
        return deepcopy(parsed[text, Loader.__name__])

    yaml.load = load
    yield
    yaml.load = parse


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all processes among which the tests are divided."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def long_tail_task(shared_folder: Path) -> TaskPaths:
    """A task in which every twentieth prompt, first the eleventh, has an answer of 121 tokens, and the others of 6."""
    return ensure_task(
        shared_folder / "long_tail" / "task", TaskSettings(lengths="long_tail", train_size=400, val_size=200)
    )


@pytest.fixture(scope="session", autouse=True)
def forks(request: pytest.FixtureRequest) -> None:
    if given := getattr(request.config, "workerinput", None):
        take_forks(given["forks"])


def pytest_unconfigure() -> None:
    """End the shared processes from which workers and runs are forked."""
    end_shared_forks()

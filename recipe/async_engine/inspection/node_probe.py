# SPDX-License-Identifier: Apache-2.0
"""The function that each node of a cluster runs to report its packages and files.

Contract: `probe` is pickled by value and needs only the standard library, so a node answers even if this package is not
installed on it. `probe` changes nothing on the node.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

SEEN_S, POLL_S = 10.0, 0.2
"""Seconds to wait for the marker file, which a network file system may show late, and seconds between two checks."""


def probe(paths: list[tuple[str, str]], marker: str, modules: list[str]) -> dict[str, Any]:
    """Return the fields of `config.facts.NodeFact`, except the node's address.

    ``paths`` are pairs of a setting and the path to check; ``marker`` is a file that the main process has just written
    to the run's folder; ``modules`` are arguments for `is_there`.
    """
    facts: dict[str, Any] = {"sees_folder": appears(marker), "absent": absent(modules)}
    with suppress(ImportError):
        from recipe.async_engine import __version__
        from recipe.async_engine.features import loading_routes

        facts |= {"recipe": __version__, "routes": tuple(loading_routes())}
    with suppress(PackageNotFoundError):
        facts["verl"] = version("verl")
    facts["faults"] = tuple((setting, path, fault) for setting, path in paths if (fault := unreadable(path)))
    return facts


def absent(modules: Iterable[str]) -> tuple[str, ...]:
    return tuple(module for module in modules if not is_there(module))


def is_there(module: str) -> bool:
    """Return whether a module is installed, without importing anything.

    ``a==1.2`` asks for the package ``a`` in release 1.2 or in one whose number begins with "1.2.".
    """
    package, _, release = module.partition("==")
    if release:
        try:
            return f"{version(package)}.".startswith(f"{release}.")
        except PackageNotFoundError:
            return False
    top, *parts = module.split(".")
    # Search the folders in PYTHONPATH too. Workers will search them, but this process may be a fork from before
    # PYTHONPATH was set.
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [path for path in more if path])
        for part in parts:
            spec = None if spec is None else PathFinder.find_spec(part, spec.submodule_search_locations or [])
    except (ImportError, ValueError):
        return False
    return spec is not None


def unreadable(path: str) -> str | None:
    """Return why a file or folder cannot be read on this machine; None if it can."""
    path = os.path.expanduser(path)
    if not os.path.exists(path):
        where = "" if os.path.isabs(path) else f" from {os.getcwd()}, where its workers begin"
        return f"does not exist{where}"
    return None if os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)) else "may not be read"


def appears(marker: str) -> bool:
    """Return whether the file ``marker`` exists or appears within `SEEN_S` seconds."""
    deadline = time.monotonic() + SEEN_S
    while not os.path.exists(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True

# SPDX-License-Identifier: Apache-2.0
"""Refuses to run if another package has the name of one of this package's modes.

verl's recipe collection ships a package `recipe.partial_rollout` too. Both share the namespace `recipe`, and Python
takes whichever comes first on its path; within a verl checkout that has that submodule, this is the other one. A run
would then mix the two. Contract: a main of this package, and its trainer's process, name both places and end before
anything else starts. Shown by tests/integration/test_shadowing.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from recipe.async_engine.core.errors import WrongInstallation
from recipe.async_engine.outside import MODES


def check_not_shadowed(modes: Iterable[str] = MODES) -> None:
    """Raise `WrongInstallation`, with both places, if `recipe.<mode>` is not this package's for one of the modes."""
    ours = Path(__file__).resolve().parents[1]
    for mode in modes:
        spec = importlib.util.find_spec(f"recipe.{mode}")
        if spec is None or not spec.submodule_search_locations:
            continue
        found = Path(next(iter(spec.submodule_search_locations))).resolve()
        if found != ours / mode:
            raise WrongInstallation(
                f"recipe.{mode} is two packages here: {found} comes first on Python's path and hides {ours / mode}, "
                "which belongs to the recipe.async_engine that runs. Start from another directory, or put "
                f"{ours.parent} first on PYTHONPATH."
            )

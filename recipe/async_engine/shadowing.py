# SPDX-License-Identifier: Apache-2.0
"""Refuses to run where another package has the name of one of this package's modes.

verl's recipe collection ships a package `recipe.partial_rollout` too. `recipe` is a namespace that both share, and
Python takes whichever comes first on its path: from within a verl checkout with that submodule, the other one. A run
would then mix the two. Contract: a main of this package, and the actor of its trainer, name both places and end before
anything else starts. Test: tests/integration/test_shadowing.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from recipe.async_engine.core.errors import WrongInstallation
from recipe.async_engine.outside import MODES


def check_not_shadowed(modes: Iterable[str] = MODES) -> None:
    """Raise `WrongInstallation`, with both places, unless `recipe.<mode>` is this package's, for each mode."""
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

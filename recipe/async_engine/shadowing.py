# SPDX-License-Identifier: Apache-2.0
"""Refuses to run if another package has the same name as the package of one of the modes.

verl's recipe collection also has a package `recipe.partial_rollout`. Both projects share the namespace `recipe`, and
Python imports the package that comes first on its path. In a verl checkout with the recipe submodule, this is verl's,
and a run would mix code of both projects. Contract: the main process and the trainer's process check this first, and
end with an error that names both folders. Shown by tests/integration/test_shadowing.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from recipe.async_engine.core.errors import WrongInstallation
from recipe.async_engine.outside import MODES


def check_not_shadowed(modes: Iterable[str] = MODES) -> None:
    """Raise `WrongInstallation`, which names both folders, if another package shadows `recipe.<mode>` for a mode."""
    ours = Path(__file__).resolve().parents[1]
    for mode in modes:
        spec = importlib.util.find_spec(f"recipe.{mode}")
        if spec is None or not spec.submodule_search_locations:
            continue
        found = Path(next(iter(spec.submodule_search_locations))).resolve()
        if found != ours / mode:
            raise WrongInstallation(
                f"There are two packages recipe.{mode}: {found} comes first on Python's path and hides {ours / mode}, "
                "which belongs to the recipe.async_engine that runs. Start from another directory, or put "
                f"{ours.parent} first on PYTHONPATH."
            )

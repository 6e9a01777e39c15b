# SPDX-License-Identifier: Apache-2.0
"""Packages that only one command of this package needs, and how to get them."""

from collections.abc import Iterable
from importlib.util import find_spec


def lacking(command: str, extra: str, modules: Iterable[str]) -> str | None:
    """What to install for a command, in one sentence; None where all of its modules are there."""
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return None
    names = " and ".join(missing)
    return (
        f"{command} needs {names}: pip install 'verl-recipe-async[{extra}]' (in a checkout pip install -e '.[{extra}]')"
    )

# SPDX-License-Identifier: Apache-2.0
"""Installs the changes to verl that environment variables request, and checks that workers will load them.

verl loads `recipe.async_engine.plugin`, which installs the requested features. Contract:

- If no variable of `FEATURES` is set, the plugin registers and patches nothing, and imports only the standard library
  (tests/integration/test_plugin_import.py).
- If a requested feature cannot be installed, the process ends and prints the traceback. If the plugin only raised an
  exception, verl would log it at DEBUG and continue (verl/__init__.py:71-74), and the run would fail later in unrelated
  code.
- Installing twice is harmless, since both the entry point and VERL_USE_EXTERNAL_MODULES may load the plugin.

This package's commands call `check_loaded`, which refuses to start a run whose workers would not load the plugin.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping

from recipe.async_engine.core.errors import WrongInstallation
from recipe.async_engine.outside import FEATURES

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "verl.plugins"
ENTRY_POINT_NAME = "recipe"
MODULE_NAME = "recipe.async_engine.plugin"


def install_requested(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Install every requested feature and return the modules that were installed.

    Raises:
        SystemExit: a feature cannot be installed. verl catches every ``Exception`` of a plugin, and would continue
            without the feature.
    """
    requested = [item for item in FEATURES if environ.get(item[0], "").strip().lower() == item[1]]
    for variable, value, module in requested:
        try:
            importlib.import_module(module).install()
        except Exception as error:
            message = (
                f"recipe: {variable}={value} asks for {module}, which failed to load "
                f"({type(error).__name__}: {error}). Unset {variable} or fix this error."
            )
            logger.critical(message, exc_info=True)
            raise SystemExit(message) from error
    return [module for _, _, module in requested]


def loading_routes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the mechanisms by which ``import verl`` loads the plugin in a process with this environment."""
    routes = []
    external = [name.strip() for name in environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")]
    if MODULE_NAME in external:
        routes.append("VERL_USE_EXTERNAL_MODULES")
    policy = environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    names = {name.strip() for name in policy.split(",")}
    if policy != "none" and names & {"auto", ENTRY_POINT_NAME} and _entry_point_installed():
        routes.append("entry point")
    return routes


def check_loaded(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `WrongInstallation`, which says what to do, if workers with this environment would not load the plugin."""
    if loading_routes(environ):
        return
    policy = environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if _entry_point_installed():
        raise WrongInstallation(
            f"VERL_USE_EXTERNAL_PLUGINS={policy!r} keeps verl from loading the plugin {ENTRY_POINT_NAME!r}. "
            f"Set it to 'auto' or add {ENTRY_POINT_NAME!r} to its comma-separated names."
        )
    raise WrongInstallation(
        f"The entry point {ENTRY_POINT_NAME!r} of group {ENTRY_POINT_GROUP!r} is not installed, so verl would not load "
        "this package in its workers. Run `pip install -e .` in the checkout, or, without installing, put the checkout "
        f"on PYTHONPATH and set VERL_USE_EXTERNAL_MODULES={MODULE_NAME}."
    )


def _entry_point_installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == MODULE_NAME for point in entry_points(group=ENTRY_POINT_GROUP))

# SPDX-License-Identifier: Apache-2.0
"""Adds the recipe's configuration folders, and verl's, to the search path of every Hydra program.

Hydra imports every module of the namespace package `hydra_plugins` at start-up, so importing this module loads nothing
but Hydra and parts of the standard library. The plugin makes the recipe's config groups (`preset`, `async_engine`)
available to every program, so ``+preset=tiny_cpu`` also works with a stock verl main, from any directory. The plugin
also adds the folders of the modes and of verl. So a user's own primary config file can extend a file in these folders
(``defaults: [fully_async_ppo_trainer, _self_]``) without setting a search path.

verl's folder is added by its path and not as `pkg://verl.trainer.config`, because Hydra imports a package to locate it,
and importing verl takes six seconds.
"""

import contextlib
import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

PROVIDER = "recipe"
PACKAGES = ("async_engine", "laptop", "fully_async", "one_step_off", "partial_rollout")
CONFIGS = tuple(f"pkg://recipe.{name}.config" for name in PACKAGES)


def verl_config_folder() -> str:
    """Return the folder of the installed verl's configuration, without importing verl.

    Raises:
        ModuleNotFoundError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("verl is not installed in this environment; install verl==0.9.1")
    return str(Path(spec.origin).parent / "trainer" / "config")


class RecipeSearchPath(SearchPathPlugin):
    """Appends folders to the search path, in this order: those of the recipe, then verl's.

    Files in a program's own folder take precedence, because it comes first in the search path.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders. Hydra calls this method once, while it builds the search path."""
        for path in CONFIGS:
            search_path.append(provider=PROVIDER, path=path)
        with contextlib.suppress(ModuleNotFoundError):
            search_path.append(provider=PROVIDER, path=f"file://{verl_config_folder()}")

# SPDX-License-Identifier: Apache-2.0
"""Adds the recipe's shared config groups (`preset`, `async_engine`) to the search path of every Hydra program.

Hydra imports every module of the namespace package `hydra_plugins` at start-up, so this one imports nothing but Hydra.
With it, `+preset=tiny_cpu` also works with a stock verl main, from any directory. The modes' own configurations and
verl's are added too, so that a user's file may extend one (``defaults: [fully_async_ppo_trainer, _self_]``); otherwise
Hydra takes a search path only from the primary config file. `pkg://verl.trainer.config` would also find verl's, but
Hydra imports a package to locate it, and importing verl with torch and transformers takes six seconds.
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
    """Appends the configuration folders: a program's own files go before the recipe's, and those before verl's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders; Hydra calls this once, while it builds the config search path."""
        for path in CONFIGS:
            search_path.append(provider=PROVIDER, path=path)
        with contextlib.suppress(ModuleNotFoundError):
            search_path.append(provider=PROVIDER, path=f"file://{verl_config_folder()}")

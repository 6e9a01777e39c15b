# SPDX-License-Identifier: Apache-2.0
"""Makes the recipe's shared config groups (`preset`, `async_engine`) known to every Hydra program.

Hydra imports every module of the namespace package `hydra_plugins` at start-up, so this one imports nothing but Hydra.
With it, `+preset=tiny_cpu` also works with a stock verl main, from any directory.

Also registers the resolver ``verl_config``, the folder of verl's own configuration. ``pkg://verl.trainer.config`` would
name it too, but Hydra imports a package to find it, and verl with torch and transformers takes six seconds to import.
"""

import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

PROVIDER = "recipe"
SHARED_CONFIG = "pkg://recipe.async_engine.config"


def verl_config_folder() -> str:
    """Where the installed verl keeps its configuration; nothing is imported to find it.

    Raises:
        ModuleNotFoundError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("verl is not installed in this environment; install verl==0.9.1")
    return str(Path(spec.origin).parent / "trainer" / "config")


OmegaConf.register_new_resolver("verl_config", verl_config_folder, replace=True)


class RecipeSearchPath(SearchPathPlugin):
    """Appends the shared config directory: a program's own groups win over ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra once, while it builds the config search path."""
        search_path.append(provider=PROVIDER, path=SHARED_CONFIG)

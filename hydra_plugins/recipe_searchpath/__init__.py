# SPDX-License-Identifier: Apache-2.0
"""Makes the recipe's shared config groups (`preset`, `async_engine`) known to every Hydra program.

Hydra imports every module of the namespace package `hydra_plugins` at start-up, so this one imports nothing but Hydra.
With it, `+preset=tiny_cpu` also works with a stock verl main, from any directory. The modes' own configurations and
verl's are found too, so that a file of the user's may start from one (``defaults: [fully_async_ppo_trainer, _self_]``):
Hydra takes a search path from nobody but the file that is named to the main. `pkg://verl.trainer.config` would name
verl's too, but Hydra imports a package to find it, and verl with torch and transformers takes six seconds to import.
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
    """Where the installed verl keeps its configuration; nothing is imported to find it.

    Raises:
        ModuleNotFoundError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("verl is not installed in this environment; install verl==0.9.1")
    return str(Path(spec.origin).parent / "trainer" / "config")


class RecipeSearchPath(SearchPathPlugin):
    """Appends the folders of configurations: a program's own win over ours, and ours over verl's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra once, while it builds the config search path."""
        for path in CONFIGS:
            search_path.append(provider=PROVIDER, path=path)
        with contextlib.suppress(ModuleNotFoundError):
            search_path.append(provider=PROVIDER, path=f"file://{verl_config_folder()}")

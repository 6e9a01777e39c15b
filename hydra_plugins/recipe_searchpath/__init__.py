# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Makes the recipe's shared config groups (`preset`, `async_engine`) known to every Hydra program.

Hydra imports every module of the namespace package `hydra_plugins` at start-up, so this one imports nothing but Hydra.
With it, `+preset=tiny_cpu` also works with a stock verl main, from any directory.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

PROVIDER = "recipe"
SHARED_CONFIG = "pkg://recipe.async_engine.config"


class RecipeSearchPath(SearchPathPlugin):
    """Appends the shared config directory: a program's own groups win over ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra once, while it builds the config search path."""
        search_path.append(provider=PROVIDER, path=SHARED_CONFIG)

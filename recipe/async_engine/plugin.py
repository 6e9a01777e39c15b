# SPDX-License-Identifier: Apache-2.0
"""The plugin that verl loads: it installs, when imported, the features that the environment asks for.

The ``verl.plugins`` entry point names this module, so every process that imports verl imports it, including Ray workers
of unrelated jobs. Nothing else may import it: it acts only the first time, and a variable that is set after that would
have no effect.
"""

from recipe.async_engine.features import install_requested

install_requested()

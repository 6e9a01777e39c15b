# SPDX-License-Identifier: Apache-2.0
"""The plugin that verl loads: importing this module installs the features that environment variables request.

The ``verl.plugins`` entry point names this module, so every process that imports verl imports it, including Ray workers
of unrelated jobs. No other code may import this module: it runs once per process, so a variable that is set after the
first import would have no effect.
"""

from recipe.async_engine.features import install_requested

install_requested()

# SPDX-License-Identifier: Apache-2.0
"""The plugin that verl loads: importing this module installs the features that environment variables request.

The ``verl.plugins`` entry point names this module, so every process that imports verl imports it, including Ray workers
of unrelated jobs. No other code may import this module, because it runs only at its first import in a process: a
variable that is set after an early import would have no effect.
"""

from recipe.async_engine.features import install_requested

install_requested()

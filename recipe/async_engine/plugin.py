# SPDX-License-Identifier: Apache-2.0
"""What verl loads: installs, at import, the features that the environment asks for.

The ``verl.plugins`` entry point names this module, so it is imported in every process that imports verl, the Ray
workers of unrelated jobs included. Nothing else imports it: a module that is already there would not act a second time,
and verl would go without what was asked for in between.
"""

from recipe.async_engine.features import install_requested

install_requested()

# SPDX-License-Identifier: Apache-2.0
"""What a configuration must fulfil, by subject. A rule yields a problem for each setting that cannot be used as it is.

`recipe.async_engine.settings.validation` applies them; no one else needs them.
"""

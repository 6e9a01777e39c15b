# SPDX-License-Identifier: Apache-2.0
"""Code that the main programs share: those of this package's modes, and stock verl's with a flag that selects a mode.

A mode is `fully_async`, `one_step_off` or `partial_rollout`; a flag is an argument ``+recipe=...`` of
``verl.trainer.main_ppo``. This package combines `recipe.async_engine` with packages that `recipe.async_engine` must not
import: support for laptops, planning and reports.
"""

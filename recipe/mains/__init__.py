# SPDX-License-Identifier: Apache-2.0
"""Code that the main programs share: those of this package's modes, and stock verl's with a flag that selects a mode.

A mode is `fully_async`, `one_step_off` or `partial_rollout`; a flag is an argument ``+recipe=...`` of
``verl.trainer.main_ppo``. `recipe.async_engine` must not import the packages for laptops, planning and reports; this
package imports both it and them.
"""

# SPDX-License-Identifier: Apache-2.0
"""Code that the main programs share: those of this package's modes, and stock verl's with a flag that selects a mode.

A mode is `fully_async`, `one_step_off` or `partial_rollout`; a flag is an argument ``+recipe=...`` of
``verl.trainer.main_ppo``. `recipe.async_engine` must not import `recipe.laptop`, `recipe.plan` or `recipe.report`. So
the code that needs these packages and `recipe.async_engine` is here.
"""

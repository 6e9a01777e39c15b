# SPDX-License-Identifier: Apache-2.0
"""Entry points: the main program of each mode, and the modes as trainers that a flag selects in stock verl's main.

A mode is `fully_async`, `one_step_off` or `partial_rollout`; a flag is an argument ``+recipe=...`` of
``verl.trainer.main_ppo``. This package combines `recipe.async_engine` with the packages that it must not import:
support for laptops, planning and reports.
"""

# SPDX-License-Identifier: Apache-2.0
"""Registers v1 trainers with verl: one for each mode of this package, and extended versions of verl's own trainers.

A flag (``+recipe=...``) sets the environment variable `VARIABLE` in the run's processes. If the variable is set, this
package's plugin for verl calls `install`. Contract: `install` imports none of verl's trainers; it sets a hook that
registers the trainers when verl's task runner imports `verl.trainer.ppo.v1`. Shown by tests/integration/test_flags.py
and tests/e2e/test_flags.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

VARIABLE = "RECIPE_V1_TRAINERS"
V1 = "verl.trainer.ppo.v1"


def install() -> None:
    """Set an import hook that registers the trainers when `verl.trainer.ppo.v1` is imported."""
    register_post_import_hook(_register, V1)


def _register(v1: ModuleType) -> None:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer

    from recipe.async_engine.v1.trainers import TRAINERS as OF_VERL
    from recipe.mains.trainer import TRAINERS as OF_MODES

    trainers: tuple[Any, ...] = (*OF_MODES, *OF_VERL)
    for trainer in trainers:
        if trainer.name not in TRAINER_REGISTRY:
            register_trainer(trainer.name)(trainer)

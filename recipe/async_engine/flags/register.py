# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Registers the modes, and verl's trainers with our parts beside them, with verl's v1 line, where one is looked up.

The configuration group ``recipe`` sets `VARIABLE` for the processes of its run. Contract: what is installed there is a
hook, which costs no import of verl's trainers; it runs when `verl.trainer.ppo.v1` is imported, as verl's task runner
does. Shown by tests/integration/test_flags.py and tests/e2e/test_flags.py.
"""

from __future__ import annotations

from types import ModuleType

from wrapt import register_post_import_hook

VARIABLE = "RECIPE_V1_TRAINERS"
V1 = "verl.trainer.ppo.v1"


def install() -> None:
    """Have the modes registered once verl's v1 trainers are imported."""
    register_post_import_hook(_register, V1)


def _register(v1: ModuleType) -> None:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer

    from recipe.async_engine.flags.trainer import TRAINERS as MODES
    from recipe.async_engine.v1.trainers import TRAINERS as OF_VERL

    for trainer in (*MODES, *OF_VERL):
        if trainer.name not in TRAINER_REGISTRY:
            register_trainer(trainer.name)(trainer)

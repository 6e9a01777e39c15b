# SPDX-License-Identifier: Apache-2.0
"""Who judges a configuration beside the rules of the engine."""

from recipe.async_engine.config.validation import Judge
from recipe.plan.memory import estimate as memory
from recipe.programs import check as programs

JUDGES: tuple[Judge, ...] = (memory, programs)
V1_JUDGES: tuple[Judge, ...] = (memory,)
"""Of a run of verl's own v1 trainers, whose rewards are their own affair."""

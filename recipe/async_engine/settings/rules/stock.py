# SPDX-License-Identifier: Apache-2.0
"""What of a script's profiles verl would leave out."""

from collections.abc import Iterator

from recipe.async_engine.settings.rules.context import RuleContext
from recipe.async_engine.settings.verl_types import ROLLOUT


def without_effect(context: RuleContext) -> Iterator[str]:
    """What is another mode's, or is asked for in a way in which verl leaves it out."""
    profiler = f"{ROLLOUT}.profiler"
    tool = context.get(f"{profiler}.tool")
    if context.get("global_profiler.steps") and context.get(f"{profiler}.enable"):
        if tool not in ("torch", "npu"):
            yield f"{profiler}.enable=true has no effect: verl profiles rollout engines with torch or npu, not {tool}"
        elif not context.get(f"{profiler}.tool_config.{tool}.discrete"):
            needed = f"{profiler}.tool_config.{tool}.discrete=true"
            yield f"{profiler}.enable=true has no effect: verl profiles rollout engines with {needed} alone"

# SPDX-License-Identifier: Apache-2.0
"""Rules over settings of stock verl's features: memory of replicas and profiles."""

from collections.abc import Iterator

from recipe.async_engine.settings.fields import is_count
from recipe.async_engine.settings.problems import Problem
from recipe.async_engine.settings.rules.context import RuleContext
from recipe.async_engine.settings.verl_types import ROLLOUT


def memory_share(context: RuleContext) -> Iterator[Problem]:
    """It takes the place of `gpu_memory_utilization` where replicas have accelerators of their own."""
    setting = f"{ROLLOUT}.standalone_gpu_memory_utilization"
    value = context.get(setting)
    is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    if value is not None and not is_share:
        advice = f"It is the share of an accelerator that an engine takes; null: {ROLLOUT}.gpu_memory_utilization."
        yield context.problem(setting, "a number > 0 and <= 1, or null", advice)


def profiled_steps(context: RuleContext) -> Iterator[Problem]:
    """verl asks whether a step is among them."""
    setting, steps = "global_profiler.steps", context.get("global_profiler.steps")
    if steps is not None and not (isinstance(steps, list | tuple) and all(map(is_count, steps))):
        yield context.problem(setting, "a list of steps from 1 on, or null", "Write [2], or [2,3].")


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

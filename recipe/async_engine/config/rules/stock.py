# SPDX-License-Identifier: Apache-2.0
"""What of a script verl would leave out beside another setting of it."""

from collections.abc import Iterator

from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.verl_types import ROLLOUT


def without_effect(context: RuleContext) -> Iterator[str]:
    """What is another mode's, or is asked for in a way in which verl leaves it out."""
    estimator = context.get("algorithm.adv_estimator")
    if context.get("algorithm.use_pf_ppo") and estimator != "gae":
        yield f"algorithm.use_pf_ppo=true has no effect: verl resamples with adv_estimator=gae alone, not {estimator}"
    path, mode = context.get("trainer.resume_from_path"), context.get("trainer.resume_mode")
    if path and mode != "resume_path":
        yield f"trainer.resume_from_path={path} has no effect with trainer.resume_mode={mode}: set resume_path"
    profiler = f"{ROLLOUT}.profiler"
    tool = context.get(f"{profiler}.tool")
    if context.get("global_profiler.steps") and context.get(f"{profiler}.enable"):
        if tool not in ("torch", "npu"):
            yield f"{profiler}.enable=true has no effect: verl profiles rollout engines with torch or npu, not {tool}"
        elif not context.get(f"{profiler}.tool_config.{tool}.discrete"):
            needed = f"{profiler}.tool_config.{tool}.discrete=true"
            yield f"{profiler}.enable=true has no effect: verl profiles rollout engines with {needed} alone"

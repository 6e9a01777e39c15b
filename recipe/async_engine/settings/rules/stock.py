# SPDX-License-Identifier: Apache-2.0
"""Rules over settings of stock verl's features: classes in place of its own, resources, profiles."""

from collections.abc import Iterator

from recipe.async_engine.settings.fields import is_count, render
from recipe.async_engine.settings.problems import Problem
from recipe.async_engine.settings.rules.context import RuleContext
from recipe.async_engine.settings.sections import SHARED, RolloutResources
from recipe.async_engine.settings.verl_types import ROLLOUT

PLACEHOLDER = "recipe.async_engine.flags.trainer.NoAgentLoops"
"""What a flag has stock verl's task runner make in place of an agent-loop manager."""
SIZES = ("nnodes", "n_gpus_per_node")


def classes(context: RuleContext) -> Iterator[Problem]:
    """Managers of a user's that would not be made: what they change has another way in, or none."""
    setting = f"{ROLLOUT}.agent.agent_loop_manager_class"
    if context.get(setting) not in (None, PLACEHOLDER):
        advice = (
            "Trajectories run one by one in this package's own workers, which no other manager can drive. Agent loops "
            f"of your own go by {ROLLOUT}.agent.agent_loop_config_path, in every mode; remove the setting."
        )
        yield context.problem(setting, "null", advice)
    setting = f"{ROLLOUT}.checkpoint_manager_class"
    if context.get(setting) is not None:
        advice = (
            "Weights are published by this package, with deadlines and versions; how they travel can be changed by "
            f"{ROLLOUT}.checkpoint_engine.backend and custom_backend_module. Remove the setting."
        )
        yield context.problem(setting, "null", advice)


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
    yield from _resources(context)


def _resources(context: RuleContext) -> Iterator[str]:
    rollout, shared = context.settings.rollout, context.settings.async_training.placement == SHARED
    asked, default = (rollout.nnodes, rollout.n_gpus_per_node), RolloutResources()
    trainers = tuple(context.get(f"trainer.{name}") for name in SIZES)
    if shared and asked not in ((default.nnodes, default.n_gpus_per_node), trainers):
        yield _ignored("rollout", asked, "generation takes turns with training on trainer.nnodes x n_gpus_per_node")
    of_verl = tuple(context.get(f"{ROLLOUT}.{name}") for name in SIZES)
    if is_count(of_verl[0]) and of_verl not in (asked, trainers):
        instead = "trainer.nnodes and n_gpus_per_node" if shared else "rollout.nnodes and rollout.n_gpus_per_node"
        yield _ignored(ROLLOUT, of_verl, f"{instead} say where this mode generates")
    share = f"{ROLLOUT}.standalone_gpu_memory_utilization"
    if shared and context.get(share) is not None:
        yield f"{share}={render(context.get(share))} has no effect: no replica has accelerators of its own in this mode"


def _ignored(section: str, sizes: tuple[object, ...], why: str) -> str:
    given = ", ".join(f"{section}.{name}={render(size)}" for name, size in zip(SIZES, sizes, strict=True))
    return f"{given} have no effect: {why}"

# SPDX-License-Identifier: Apache-2.0
"""Rules over the reward model's settings; see :mod:`recipe.async_engine.config.validation`."""

from collections.abc import Iterator

from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import REWARD_MODEL, RuleContext


def reward_model(context: RuleContext) -> Iterator[Problem]:
    if not context.get(f"{REWARD_MODEL}.enable"):
        return
    for setting in ("nnodes", "n_gpus_per_node"):
        if context.count(f"{REWARD_MODEL}.{setting}") is None:
            advice = "Set the accelerators that the reward model's servers are started on."
            yield context.problem(f"{REWARD_MODEL}.{setting}", "an integer >= 1", advice)
    rollout = f"{REWARD_MODEL}.rollout"
    size = context.count(f"{rollout}.tensor_model_parallel_size") or 1
    total = accelerators(context)
    # Where there are none, that has been said.
    if total and total % size:
        advice = f"They are the {total} of {REWARD_MODEL}.nnodes * n_gpus_per_node."
        allowed = "a divisor of the reward model's accelerators"
        yield context.problem(f"{rollout}.tensor_model_parallel_size", allowed, advice)


def accelerators(context: RuleContext) -> int:
    """Of the reward model's servers."""
    if not context.get(f"{REWARD_MODEL}.enable") or not context.get(f"{REWARD_MODEL}.enable_resource_pool"):
        return 0
    return (context.count(f"{REWARD_MODEL}.nnodes") or 0) * (context.count(f"{REWARD_MODEL}.n_gpus_per_node") or 0)

# SPDX-License-Identifier: Apache-2.0
"""Rules over the reward model's settings; see :mod:`recipe.async_engine.settings.validation`."""

from collections.abc import Iterator

from recipe.async_engine.settings.problems import Problem
from recipe.async_engine.settings.rules.context import REWARD_MODEL, RuleContext

PROGRAMS_S = 60.0
"""Default of ``answer_s`` in `recipe.async_engine.rewards.programs`: seconds for all test cases of an answer."""


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


def programs(context: RuleContext) -> Iterator[Problem]:
    """The reward of programming tasks: its settings, and whether programs can be isolated where it runs."""
    for fact in (fact for fact in context.files if fact.kind == "programs"):
        kwargs, limit = f"{fact.setting}.reward_kwargs", context.settings.async_training.timeouts.reward
        answer = context.get(f"{kwargs}.answer_s", PROGRAMS_S)
        if fact.fault is not None:
            yield Problem(fact.setting, fact.path, "a reward that can run with its settings, here", fact.fault)
        elif not isinstance(answer, int | float) or not 0 < answer <= limit / 2:
            allowed = f"seconds above 0, at most half of async_training.timeouts.reward={limit:g}"
            advice = "Else a slow answer costs its whole group, not its own score alone."
            yield Problem(f"{kwargs}.answer_s", str(answer), allowed, advice)


def accelerators(context: RuleContext) -> int:
    """Of the reward model's servers."""
    if not context.get(f"{REWARD_MODEL}.enable") or not context.get(f"{REWARD_MODEL}.enable_resource_pool"):
        return 0
    return (context.count(f"{REWARD_MODEL}.nnodes") or 0) * (context.count(f"{REWARD_MODEL}.n_gpus_per_node") or 0)

# SPDX-License-Identifier: Apache-2.0
"""Rules over the reward model's settings; see :mod:`recipe.async_engine.core.validation`."""

from __future__ import annotations

from collections.abc import Iterator

from recipe.async_engine.core.case import REWARD_MODEL, Case
from recipe.async_engine.core.problems import Problem

PROGRAMS_S = 60.0
"""Default of ``answer_s`` in `recipe.async_engine.rewards.programs`: seconds for all test cases of an answer."""


def reward_model(case: Case) -> Iterator[Problem]:
    if not case.get(f"{REWARD_MODEL}.enable"):
        return
    if not case.get(f"{REWARD_MODEL}.enable_resource_pool"):
        advice = "Answers are scored while others are generated and trained on: give the model accelerators of its own."
        yield case.problem(f"{REWARD_MODEL}.enable_resource_pool", f"true with {REWARD_MODEL}.enable=true", advice)
    for setting in ("nnodes", "n_gpus_per_node"):
        if case.count(f"{REWARD_MODEL}.{setting}") is None:
            advice = "Set the accelerators that the reward model's servers are started on."
            yield case.problem(f"{REWARD_MODEL}.{setting}", "an integer >= 1", advice)
    rollout = f"{REWARD_MODEL}.rollout"
    if case.get(f"{rollout}.name") != "vllm":
        yield case.problem(f"{rollout}.name", "vllm", "Other engines are not supported for reward models.")
    size = case.count(f"{rollout}.tensor_model_parallel_size") or 1
    total = accelerators(case)
    # Where there are none, that has been said.
    if total and total % size:
        advice = f"They are the {total} of {REWARD_MODEL}.nnodes * n_gpus_per_node."
        allowed = "a divisor of the reward model's accelerators"
        yield case.problem(f"{rollout}.tensor_model_parallel_size", allowed, advice)


def programs(case: Case) -> Iterator[Problem]:
    """The reward of programming tasks: its settings, and whether programs can be isolated where it runs."""
    for fact in (fact for fact in case.files if fact.kind == "programs"):
        kwargs, limit = f"{fact.setting}.reward_kwargs", case.settings.async_training.timeouts.reward
        answer = case.get(f"{kwargs}.answer_s", PROGRAMS_S)
        if fact.fault is not None:
            yield Problem(fact.setting, fact.path, "a reward that can run with its settings, here", fact.fault)
        elif not isinstance(answer, int | float) or not 0 < answer <= limit / 2:
            allowed = f"seconds above 0, at most half of async_training.timeouts.reward={limit:g}"
            advice = "Else a slow answer costs its whole group, not its own score alone."
            yield Problem(f"{kwargs}.answer_s", str(answer), allowed, advice)


def accelerators(case: Case) -> int:
    """Of the reward model's servers."""
    if not case.get(f"{REWARD_MODEL}.enable") or not case.get(f"{REWARD_MODEL}.enable_resource_pool"):
        return 0
    return (case.count(f"{REWARD_MODEL}.nnodes") or 0) * (case.count(f"{REWARD_MODEL}.n_gpus_per_node") or 0)

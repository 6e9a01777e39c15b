# SPDX-License-Identifier: Apache-2.0
"""Checks before a run that the reward function for programming tasks (`reward`) can run with its settings.

Contract: the check runs an empty program in a sandbox on this machine. If the run joins a Ray cluster, nothing is
checked here, and reward workers report problems during the run. Shown by tests/integration/test_config_files.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.programs import reward

FUNCTION = "reward.custom_reward_function"


def problems(context: RuleContext) -> Iterator[Problem]:
    """Yield a problem if the reward's settings are invalid, or if this machine cannot run programs in a sandbox."""
    path = str(context.get(f"{FUNCTION}.path") or "")
    if not _is_ours(path) or context.get("ray_kwargs.ray_init.address"):
        return
    kwargs, limit = f"{FUNCTION}.reward_kwargs", context.settings.async_training.timeouts.reward
    answer = context.get(f"{kwargs}.answer_s", reward.ANSWER_S)
    if (fault := _fault(context.get(kwargs))) is not None:
        yield Problem(FUNCTION, path, "a reward that can run with its settings on this machine", fault)
    elif not isinstance(answer, int | float) or not 0 < answer <= limit / 2:
        allowed = f"seconds above 0, at most half of async_training.timeouts.reward={limit:g}"
        advice = "Otherwise a slow answer fails its whole group instead of only losing its own score."
        yield Problem(f"{kwargs}.answer_s", str(answer), allowed, advice)


def warnings(context: RuleContext) -> Iterator[str]:
    """Yield nothing; the interface of a check requires this function."""
    yield from ()


def _is_ours(path: str) -> bool:
    return path == f"pkg://{reward.__name__}" or (os.path.exists(path) and os.path.samefile(path, reward.__file__))


def _fault(kwargs: object) -> str | None:
    try:
        return reward.fault(**(kwargs or {}))  # type: ignore[arg-type]
    except TypeError as error:
        return f"reward_kwargs: {error}."

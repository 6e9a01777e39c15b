# SPDX-License-Identifier: Apache-2.0
"""Shares of memory and steps to profile are refused, accepted, or said to have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_engine.config.notices import beside_others, notices
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import read_settings
from recipe.async_engine.config.verl_types import well_formed
from recipe.plan.memory.engines import standalone_share

ROLLOUT = "actor_rollout_ref.rollout"
SIZES = ("nnodes", "n_gpus_per_node")


def context(placement: str = "separate", top: tuple[int, int] = (1, 8), **rollout: Any) -> RuleContext:
    config = {
        "async_training": {"placement": placement},
        "rollout": dict(zip(SIZES, top, strict=True)),
        "trainer": {"nnodes": 1, "n_gpus_per_node": 4},
        # These are verl's defaults; n_gpus_per_node is an interpolation of the trainer's.
        "actor_rollout_ref": {"rollout": {"nnodes": 0, "n_gpus_per_node": 4, **rollout}},
    }
    return RuleContext(config, read_settings(config)[0], None, None, ())


def refused(case: RuleContext) -> list[str]:
    return [problem.setting for problem in well_formed(dict(case.config), misses=False)[1]]


@pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan"), float("inf"), True, "0.8", [0.8]])
def test_memory_shares_that_are_none_are_refused(share: Any) -> None:
    assert refused(context(standalone_gpu_memory_utilization=share)) == [f"{ROLLOUT}.standalone_gpu_memory_utilization"]


def test_share_of_standalone_replicas_counts_where_there_are_some() -> None:
    for share in (0.85, 1):
        case = context(standalone_gpu_memory_utilization=share)
        assert refused(case) == []
        assert standalone_share(case.config) == share and list(beside_others(case)) == []
    shared = context("shared", standalone_gpu_memory_utilization=0.85)
    assert standalone_share(shared.config) is None
    said = f"{ROLLOUT}.standalone_gpu_memory_utilization=0.85 has no effect"
    assert any(notice.startswith(said) for notice in notices(shared, {}))
    assert standalone_share(context().config) is None


def profiling(steps: Any, tool: str | None, discrete: bool, enable: bool = True) -> RuleContext:
    case = context(profiler={"enable": enable, "tool": tool, "tool_config": {"torch": {"discrete": discrete}}})
    config = {**case.config, "global_profiler": {"steps": steps}}
    return RuleContext(config, case.settings, None, None, ())


@pytest.mark.parametrize("steps", [2, "2", [0], [1.5], ["2"], [True], {"a": 1}, [None]])
def test_steps_to_profile_that_are_none_are_refused(steps: Any) -> None:
    assert refused(profiling(steps, "torch", True)) == ["global_profiler.steps"]


def test_engines_that_verl_would_not_profile_are_said_to_be_left_out() -> None:
    for steps in (None, [], [2, 3]):
        assert refused(profiling(steps, "torch", True)) == []
        assert list(beside_others(profiling(steps, "torch", True))) == []
    assert list(beside_others(profiling([2], "torch", False, enable=False))) == []
    assert "discrete=true alone" in next(beside_others(profiling([2], "torch", False)))
    for tool in ("nsys", None):
        assert f"not {tool}" in next(beside_others(profiling([2], tool, True)))

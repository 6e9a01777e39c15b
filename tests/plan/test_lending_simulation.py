# SPDX-License-Identifier: Apache-2.0
"""Simulated runs whose accelerators change sides keep the staleness bound and the books, and lose no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_engine.core.lending import Demand, LendingPolicy, Places
from recipe.plan.lending import LendingSimulation
from recipe.plan.simulation import Scenario, Simulation
from recipe.plan.times import Switch, Times

SCENARIO = Scenario(
    batch_groups=4,
    answers=2,
    replicas=1,
    slots=8,
    places=8,
    max_staleness=2,
    pipeline_depth=2,
    trainer_ranks=2,
    steps=12,
)
SWITCH = Switch(0.2, 0.1)
LENGTHS = tuple((1 + draw % 7, 1 + (draw * draw) % 29) for draw in range(40))


def times(update: float = 2.0, **more: Any) -> Times:
    return Times(
        groups=LENGTHS,
        step_s=lambda batch, context: 0.5 + 0.05 * batch,
        read_s=lambda tokens: 0.01 * tokens,
        update_s=lambda lengths, ranks: update / ranks,
        log_probs_s=lambda lengths, ranks: 0.0,
        stage_s=0.3,
        swap_s=0.2,
        **more,
    )


class Capricious(LendingPolicy):
    """Answers as it is told to, and at last as the policy does: whatever it says, the run must be right."""

    def __init__(self, answers: list[bool]) -> None:
        super().__init__()
        self._answers = answers

    def lends(self, places: Places, demand: Demand) -> bool:
        """Return what was given, if the trainer waits."""
        wanted = self._answers.pop() if self._answers else super().lends(places, demand)
        return (wanted and not demand.may_take) or places.standalone == 0

    def calls_back(self, places: Places, demand: Demand) -> bool:
        """Return what was given, unless the policy calls back: it might not be asked again."""
        return super().calls_back(places, demand) or (self._answers.pop() if self._answers else demand.may_take)


def check(run: LendingSimulation) -> None:
    result = run.run()
    scenario = run.scenario
    assert result.trained_groups == scenario.steps * scenario.batch_groups
    assert result.staleness_max <= scenario.max_staleness
    assert sum(result.token_ages.values()) == sum(result.tokens)
    assert max(result.token_ages) <= scenario.max_staleness
    assert 0 < run.useful_share(result) <= 1 + 1e-9
    assert run.lent_s <= run.clock.now


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 3),
    st.lists(st.booleans(), max_size=60),
    st.floats(0, 5),
    st.floats(0, 5),
    st.integers(0, 1000),
    st.sampled_from(["interrupt", "keep", "drain"]),
)
def test_bound_and_books_hold_whatever_the_policy_says(
    standalone: int,
    hybrid: int,
    bound: int,
    batches: int,
    answers: list[bool],
    wake: float,
    sleep: float,
    seed: int,
    at_swap: str,
) -> None:
    scenario = replace(
        SCENARIO,
        replicas=standalone,
        trainer_ranks=hybrid,
        max_staleness=bound,
        pipeline_depth=float(bound),
        batches_per_version=batches,
        at_swap=at_swap,
    )
    check(LendingSimulation(scenario, times(switch=Switch(wake, sleep)), Capricious(answers), seed))


def test_training_that_waits_for_generation_is_faster_with_its_accelerators_lent() -> None:
    scenario = replace(SCENARIO, steps=40)
    fixed = Simulation(scenario, times(), 0).run()
    run = LendingSimulation(scenario, times(switch=SWITCH), seed=0)
    lent = run.run()
    assert run.switches > 0
    assert lent.tokens_per_s(8) > 1.2 * fixed.tokens_per_s(8)


def test_generation_that_waits_for_training_is_lent_nothing_once_it_has_been_measured() -> None:
    scenario = replace(SCENARIO, steps=40)
    run = LendingSimulation(scenario, times(update=200.0, switch=SWITCH), seed=0)
    result = run.run()
    assert run.switches <= 2
    assert result.tokens_per_s(8) == pytest.approx(
        Simulation(scenario, times(update=200.0), 0).run().tokens_per_s(8), rel=0.02
    )


def test_a_switch_that_takes_longer_than_the_wait_is_not_repeated_once_it_is_known() -> None:
    run = LendingSimulation(replace(SCENARIO, steps=40), times(switch=Switch(500.0, 500.0)), seed=0)
    run.run()
    assert run.switches == 2


def test_the_same_seed_gives_the_same_result() -> None:
    first, again = (LendingSimulation(SCENARIO, times(switch=SWITCH), seed=3).run() for _ in range(2))
    assert (first.ended, first.token_ages) == (again.ended, again.token_ages)

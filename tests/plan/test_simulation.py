# SPDX-License-Identifier: Apache-2.0
"""The simulator agrees with closed forms, keeps the staleness bound, loses no token, and repeats itself by its seed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from recipe.async_engine.record.events import Class
from recipe.plan.engine import READ_STEPS, Clock, Engine, Request
from recipe.plan.simulation import Result, Scenario, Simulation
from recipe.plan.times import Times

STEP = 0.5


def times(groups: tuple[tuple[int, ...], ...] = ((4, 4),), update: float = 1.0, **more: float) -> Times:
    return Times(
        groups=groups,
        step_s=lambda batch, context: STEP,
        read_s=lambda tokens: 0.0,
        update_s=lambda lengths, ranks: update / ranks,
        log_probs_s=lambda lengths, ranks: 0.0,
        **more,  # type: ignore[arg-type]
    )


SMALL = Scenario(batch_groups=2, answers=2, replicas=1, slots=4, places=4, steps=12)
TAILS = tuple((1 + draw % 7, 1 + (draw * draw) % 29) for draw in range(40))
WAYS = {
    "interrupt": replace(SMALL, max_staleness=2, pipeline_depth=2, slots=6),
    "keep": replace(SMALL, at_swap="keep", max_staleness=3, pipeline_depth=3, slots=8),
    "drain": replace(SMALL, at_swap="drain"),
    "one_step_off": replace(SMALL, at_swap="drain", whole_batches=True),
    "k_2": replace(SMALL, batches_per_version=2, max_staleness=2, pipeline_depth=1.5),
    "synchronous": replace(SMALL, max_staleness=0, pipeline_depth=0),
    "partial_rollout": replace(SMALL, shared=True, max_staleness=3, pipeline_depth=3),
    "two_replicas": replace(SMALL, replicas=2, max_staleness=2, pipeline_depth=2),
    "one_slot_a_group": replace(SMALL, slots=2, places=1),
}


def simulate(scenario: Scenario, seed: int = 0, **more: float) -> Result:
    return Simulation(scenario, times(TAILS, stage_s=0.7, swap_s=0.2, begin_s=0.05, **more), seed).run()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_bound_tokens_and_seconds_hold_in_every_mode(way: str, seed: int) -> None:
    scenario = WAYS[way]
    result = simulate(scenario, seed)
    assert result.trained_groups == scenario.steps * scenario.batch_groups
    assert result.staleness_max <= scenario.max_staleness
    assert max(result.token_ages) <= scenario.max_staleness
    assert sum(result.token_ages.values()) == sum(result.tokens)
    assert result.account.closes, result.account.summary()


def test_an_answer_whose_agent_loop_outlives_its_turn_is_not_generated_again() -> None:
    late = simulate(WAYS["partial_rollout"], update=0.01, end_s=1.0)
    assert sum(late.token_ages.values()) == sum(late.tokens)
    assert late.account.closes


@pytest.mark.parametrize("way", WAYS)
def test_the_same_seed_gives_the_same_result(way: str) -> None:
    first, again = (simulate(WAYS[way], 5) for _ in range(2))
    assert (first.ended, first.token_ages, first.account) == (again.ended, again.token_ages, again.account)


def test_without_a_seed_groups_have_the_lengths_of_the_record_in_its_order() -> None:
    groups = tuple((length, length) for length in (1, 2, 4, 8, 16))
    scenario = replace(SMALL, max_staleness=0, pipeline_depth=0)
    result = Simulation(scenario, times(groups), seed=None).run()
    of = scenario.batch_groups
    by_hand = [
        sum(scenario.answers * groups[n % len(groups)][0] for n in range(step * of, (step + 1) * of))
        for step in range(scenario.steps)
    ]
    assert result.tokens == by_hand


def test_synchronous_steps_take_generation_and_update() -> None:
    scenario = replace(SMALL, max_staleness=0, pipeline_depth=0)
    result = Simulation(scenario, times(stage_s=0.3, swap_s=0.2)).run()
    assert result.step_s(2) == pytest.approx(4 * STEP + 1.0 + 0.3 + 0.2)
    assert result.staleness == 0


def test_a_batch_that_is_generated_in_two_rounds_takes_two() -> None:
    scenario = replace(SMALL, max_staleness=0, pipeline_depth=0, places=2, slots=2)
    assert Simulation(scenario, times()).run().step_s(2) == pytest.approx(2 * 4 * STEP + 1.0)


@pytest.mark.parametrize(("update", "limit"), [(5.0, 5.0), (0.1, 4 * STEP)])
def test_the_slower_side_sets_the_pace_of_a_stream(update: float, limit: float) -> None:
    scenario = replace(SMALL, max_staleness=2, pipeline_depth=2, at_swap="keep", steps=40)
    result = Simulation(scenario, times(update=update)).run()
    assert result.step_s(10) == pytest.approx(limit, rel=0.02)


def test_a_trainer_that_takes_no_time_waits_all_the_time() -> None:
    scenario = replace(SMALL, max_staleness=1, pipeline_depth=1)
    seconds = Simulation(scenario, times(update=0.0)).run().account.devices["trainer"].seconds
    assert seconds["wait_batch"] == pytest.approx(sum(seconds.values()))


def test_a_tail_holds_up_the_tighter_bound() -> None:
    lengths = (*((2, 2),) * 9, (2, 80))
    steps = [
        Simulation(replace(SMALL, max_staleness=s, pipeline_depth=s, steps=60, slots=12, places=12), times(lengths), 1)
        .run()
        .step_s(5)
        for s in (1, 6)
    ]
    assert steps[1] < 0.8 * steps[0]


def test_free_places_beside_the_last_answers_of_a_batch_wait_for_them_as_in_a_runs_account() -> None:
    scenario = replace(SMALL, max_staleness=0, pipeline_depth=0)
    seconds = Simulation(scenario, times(groups=((2, 10),))).run().account.devices["rollout 0"].seconds
    # Two of four places are idle in eight of ten steps; after the last batch nothing is left to generate.
    free = 2 / 4
    assert seconds[Class.WAIT_TAIL] == pytest.approx((scenario.steps - 1) * free * 8 * STEP)
    assert seconds[Class.WAIT_END] == pytest.approx(free * 8 * STEP + 1.0)


@pytest.mark.parametrize("processes", [1, 2])
def test_rewards_that_wait_for_a_process_make_a_step_as_long_as_they_take(processes: int) -> None:
    scenario = replace(WAYS["interrupt"], reward_processes=processes)
    slow = replace(times(), rewards=(3.0,))
    # A step needs four answers of 4 decode steps each, beside an update of a second.
    assert Simulation(scenario, slow).run().step_s(4) == pytest.approx(4 * 3.0 / processes, rel=0.05)


def run_to(clock: Clock, moment: float) -> None:
    clock.after(moment - clock.now, lambda: None)
    clock.run(lambda: clock.now >= moment)


@pytest.mark.parametrize("length", [3, 9])
def test_an_engine_that_is_paused_ends_the_step_under_way(length: int) -> None:
    clock, ended = Clock(), []
    engine = Engine(clock, 2, lambda batch, context: STEP, lambda tokens: 0.0, lambda one: ended.append(clock.now))
    request = Request("one", 0, 0, length)
    engine.submit(request)
    run_to(clock, 2.3 * STEP)
    assert (engine.tokens_of(request), engine.rest_s) == (2, pytest.approx(0.7 * STEP))
    assert engine.hold() == ([] if length == 3 else [request])
    assert (engine.tokens_of(request), engine.rest_s) == (3, 0.0)
    engine.reopen()
    clock.run(lambda: False)
    assert ended == [pytest.approx((2.3 + length - 3) * STEP)]


def test_an_engine_reads_for_a_few_decode_steps_at_most_within_one() -> None:
    clock, waits = Clock(), [Request(str(number), number, 0, 9) for number in range(5)]
    engine = Engine(clock, 8, lambda batch, context: STEP, lambda tokens: READ_STEPS * STEP / 2, lambda request: None)
    for request in waits:
        engine.submit(request)
    of_two = STEP + READ_STEPS * STEP
    for steps, tokens in ((1, [1, 1, 0, 0, 0]), (2, [2, 2, 1, 1, 0])):
        run_to(clock, steps * of_two + 0.01)
        assert [engine.tokens_of(request) for request in waits] == tokens


def test_a_pause_is_as_long_as_the_step_under_way_or_the_swap() -> None:
    stream = replace(SMALL, max_staleness=2, pipeline_depth=2, at_swap="keep", steps=40)
    paces = [Simulation(stream, times(update=0.1, swap_s=swap_s)).run().step_s(10) for swap_s in (0.0, 0.1, 3 * STEP)]
    # Each version arrives 0.1 s after a step began. If the swap takes longer than the rest of the step, time is lost.
    assert paces == pytest.approx([4 * STEP, 4 * STEP, 4 * STEP + 3 * STEP - (STEP - 0.1)])


@pytest.mark.parametrize(("swap_s", "costs"), [(5 * STEP, False), (STEP, True)])
def test_answers_that_a_swap_cuts_come_back_within_it(swap_s: float, costs: bool) -> None:
    # Up to eight answers pass through the agent loops, one after the other.
    stream = replace(SMALL, max_staleness=2, pipeline_depth=2, slots=8, steps=40)
    none, some = (
        Simulation(stream, times(update=0.1, swap_s=swap_s, agents_s=agents_s)).run().step_s(10)
        for agents_s in (0.0, 0.2)
    )
    assert some > none + 0.1 if costs else some == pytest.approx(none)


def test_steps_that_grow_with_context_are_summed_exactly() -> None:
    scenario = replace(SMALL, batch_groups=1, answers=1, slots=1, places=1, max_staleness=0, pipeline_depth=0, steps=3)
    length = random.Random(0).randrange(50, 90)
    growing = replace(times(((length,),)), step_s=lambda batch, context: 0.1 + 0.001 * context)
    by_hand = sum(0.1 + 0.001 * context for context in range(length)) + 1.0
    assert Simulation(scenario, growing).run().step_s(1) == pytest.approx(by_hand)

# SPDX-License-Identifier: Apache-2.0
"""Times that are fitted to a record are those of the run that made it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipe.async_engine.record.event_file import EventFile
from recipe.async_engine.record.events import GROUPS, ROLLOUT, SWITCH, TOKENS, TRAINER, TRAJECTORIES, WEIGHTS, Event
from recipe.plan.__main__ import main, of_run
from recipe.plan.advise import advise
from recipe.plan.lending import simulated
from recipe.plan.times import CannotPlan, Switch, fitted

SETTINGS = {
    "max_staleness": 2,
    "pipeline_depth": 1.5,
    "trigger_parameter_sync_step": 1,
    "max_concurrent_trajectories": 4,
    "engine_places": 2,
    "trainer_ranks": 1,
    "rollout_replicas": 1,
    "publish": "beside",
    "at_swap": "interrupt",
    "reward_processes": 2,
    "reward_workers": 3,
    "whole_batches": False,
}
ENGINE = f"{ROLLOUT} 0"


def record(folder: Path, events: list[Event], hybrid: int = 0, **settings: int) -> Path:
    """Return the record of an engine with two places that read for 2 s and decoded for 16 s, and of a step."""
    folder.mkdir(exist_ok=True)
    devices = {"accelerators": {TRAINER: 1, ROLLOUT: 1}, "shared": False, "hybrid": hybrid}
    header = {"settings": SETTINGS | settings, **devices, "began": 0.0}
    file = EventFile(folder, header)
    decoding = [Event(ENGINE, "decoding", float(at), at + 1.0, tokens=2) for at in range(2, 18)]
    file.write([Event(ENGINE, "prefill", 0.0, 2.0, tokens=2), *decoding, *events])
    file.close()
    return folder


TRAINED = [
    *(Event(TRAJECTORIES, "generating", 0.0, 20.0, 1.0, 0, 0, n, 17) for n in range(2)),
    *(Event(TRAJECTORIES, "reward", 20.0, 20.5, 1.0, 0, 0, n) for n in range(2)),
    Event(GROUPS, "trained", 0.0, 30.0, version=0, group=0, tokens=34),
    Event(TOKENS, "0", 22.0, 22.0, version=0, tokens=34),
    Event(TRAINER, "train", 22.0, 23.0),
    Event(TRAINER, "update", 23.0, 29.8),
    Event(TRAINER, "sync", 29.8, 30.0),
    *(
        Event(WEIGHTS, what, 30.0, 30.0 + took, version=1)
        for what, took in (("stage", 3), ("swap", 0.5), ("resume", 0.1))
    ),
]


def test_a_record_gives_back_the_times_of_its_run(tmp_path: Path) -> None:
    times, run = fitted(record(tmp_path, TRAINED))
    # Two places decoded for 16 s, and each answer has 16 tokens after its first.
    assert times.step_s(2, 0) == pytest.approx(1.0)
    # Both first steps took 2 s, of which a decode step is 1 s.
    assert 2 * times.read_s(0) == pytest.approx(1.0)
    assert times.begin_s + times.end_s == pytest.approx(20.0 - 18.0)
    assert times.update_s([17, 17], 1) == pytest.approx(6.8)
    assert times.update_s([17, 17], 2) == pytest.approx(3.4)
    assert (times.driver_s, times.snapshot_s, times.stage_s, times.swap_s) == pytest.approx((1.0, 0.2, 3.0, 0.6))
    assert times.groups == ((17, 17),)
    assert set(times.rewards) == {0.5}
    scenario = of_run(run, 7)
    assert (scenario.batch_groups, scenario.answers, scenario.slots, scenario.places) == (1, 2, 4, 2)
    assert scenario.reward_processes == 2 * 3
    assert (scenario.max_staleness, scenario.pipeline_depth, scenario.beside) == (2, 1.5, True)


def test_a_run_that_lent_gives_the_time_of_a_switch_without_the_first_wake(tmp_path: Path) -> None:
    took = [9.0, 0.5, 2.0, 0.4, 1.0, 0.6, 3.0, 0.5]
    switches = [Event(TRAINER, SWITCH, 40.0 + 10 * n, 40.0 + 10 * n + seconds) for n, seconds in enumerate(took)]
    times, run = fitted(record(tmp_path, [*TRAINED, *switches], hybrid=1))
    assert times.switch == Switch(pytest.approx(2.0), pytest.approx(0.5))
    assert times.swap_s == pytest.approx(0.6)
    assert of_run(run, 7).lends
    # The advisor compares lending with the same splits without it.
    found = {advice.placement for advice in advise(of_run(run, 7), times, 4, "throughput", [0])}
    assert found == {"elastic", "separate"}


def test_a_run_that_lent_nothing_says_that_lending_cannot_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path, TRAINED)
    assert main([str(folder), "--accelerators", "4", "--seeds", "1"]) == 0
    said = capsys.readouterr()
    assert "placement=elastic" in said.err and "placement=separate" in said.out
    times, run = fitted(folder)
    with pytest.raises(CannotPlan, match="record a run that lends"):
        simulated(replace(of_run(run, 7), lends=True), times)


def test_what_is_generated_and_not_trained_yet_makes_no_update_faster(tmp_path: Path) -> None:
    ahead = [Event(TRAJECTORIES, "generating", 20.0, 40.0, 1.0, 0, 7, n, 17) for n in range(2)]
    # A version has four steps. Three of them were trained, and one more batch was taken.
    more = [Event(GROUPS, "trained", 0.0, 30.0 + n, version=0, group=n, tokens=34) for n in (1, 2)]
    taken = [Event(TOKENS, "0", at, at, version=0, tokens=34) for at in (30.5, 31.5, 32.5)]
    times, run = fitted(record(tmp_path, [*TRAINED, *ahead, *more, *taken], trigger_parameter_sync_step=4))
    assert times.update_s([34, 34, 34], 1) == pytest.approx(6.8)
    assert of_run(run, 7).batch_groups == 1
    assert times.driver_s == pytest.approx(1.0 / 3)


def updates(*steps: tuple[int, float]) -> list[Event]:
    """Return the events of updates with these tokens and seconds, one event per second, as a lane reports them."""
    found = []
    for number, (tokens, seconds) in enumerate(steps):
        at = 100.0 + 20 * number
        found.append(Event(TOKENS, "0", at, at, version=number, tokens=tokens))
        found.append(Event(GROUPS, "trained", 0.0, at + 19, version=number, group=100 + number, tokens=tokens))
        found += [Event(TRAINER, "update", at + n, min(at + n + 1, at + seconds)) for n in range(int(seconds) + 1)]
    return found


def with_prompts(folder: Path, length: float | None) -> Path:
    """Return a run whose metrics have the mean length of its prompts, if one is given."""
    if length is not None:
        (folder / "metrics.jsonl").write_text(json.dumps({"prompt_length/mean": length}) + "\n")
    return folder


LINE = updates((34, 6.8), (100, 8.5), (60, 7.5), (200, 11.0), (34, 6.85))
"""6 s and 0.025 s a token, of two answers each."""


@pytest.mark.parametrize(("prompt", "of_prompts"), [(None, 6.0), (40.0, 2.0), (1000.0, 6.0)])
def test_what_answers_do_not_explain_of_an_update_is_of_prompts_as_far_as_their_tokens_do(
    tmp_path: Path, prompt: float | None, of_prompts: float
) -> None:
    times, _ = fitted(with_prompts(record(tmp_path, [*TRAINED, *LINE]), prompt))
    other = 6.0 - of_prompts
    assert times.update_s([250, 250], 1) == pytest.approx(6.0 + 0.025 * 500, rel=0.01)
    # More ranks shorten only the part that depends on tokens.
    assert times.update_s([250, 250], 2) == pytest.approx(other + (of_prompts + 0.025 * 500) / 2, rel=0.01)
    assert times.update_s([500], 2) == pytest.approx(other / 2 + (of_prompts / 2 + 0.025 * 500) / 2, rel=0.01)


@pytest.mark.parametrize("prompt", [None, 5.0])
def test_where_tokens_explain_nothing_of_an_update_all_of_it_is_theirs(tmp_path: Path, prompt: float | None) -> None:
    noise = updates((34, 6.8), (100, 2.5), (60, 7.5), (200, 3.0), (34, 6.9))
    times, _ = fitted(with_prompts(record(tmp_path, [*TRAINED, *noise]), prompt))
    of_prompts = 2 * (prompt or 0.0)
    per_token = (6.8 + 6.8 + 2.5 + 7.5 + 3.0 + 6.9) / (34 + 428 + 6 * of_prompts)
    assert times.update_s([250, 250], 1) == pytest.approx((500 + of_prompts) * per_token)


@pytest.mark.parametrize(("processes", "own"), [(0, {0.5, 1.0, 1.5, 2.0}), (1, {0.5}), (2, {0.5, 1.0})])
def test_what_a_reward_waited_for_a_process_is_no_part_of_its_time(
    tmp_path: Path, processes: int, own: set[float]
) -> None:
    # Four answers end together, and a reward is ready every half second.
    queued = [Event(TRAJECTORIES, "reward", 40.0, 40.5 + n / 2, 1.0, 0, 9, n) for n in range(4)]
    alone = [event for event in TRAINED if event.what != "reward"]
    times, run = fitted(record(tmp_path, [*alone, *queued], reward_processes=processes, reward_workers=1))
    assert set(times.rewards) == own
    assert of_run(run, 7).reward_processes == processes


def test_answers_come_through_the_agent_loops_as_fast_as_places_fill_after_a_swap(tmp_path: Path) -> None:
    """Two places are filled at the beginning and after the swap; places that are free at other times do not count."""
    filling = [Event(ENGINE, "wait_agents", 30.5, 30.6), Event(ENGINE, "wait_agents", 32.0, 42.0)]
    # 0.2 place-seconds were missed; each time, the second place waits twice as long as the first.
    times, _ = fitted(record(tmp_path / "few", [*TRAINED, *filling]))
    assert times.agents_s == pytest.approx(2 * 0.2 / (2 * 2**2))
    # All answers arrived while some were under way.
    more = [Event(TRAJECTORIES, "generating", 18.0, 28.0, 1.0, 0, 1, n, 17) for n in range(58)]
    times, _ = fitted(record(tmp_path / "many", [*TRAINED, *more, Event(ENGINE, "wait_agents", 30.5, 31.5)]))
    assert times.agents_s == pytest.approx((18.0 + 1.0) / 60)


def test_a_record_without_an_answer_cannot_be_fitted(tmp_path: Path) -> None:
    with pytest.raises(CannotPlan, match="no answer"):
        fitted(record(tmp_path, []))


def test_advice_from_a_record_is_no_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(record(tmp_path, TRAINED)), "--accelerators", "2", "--seeds", "1", "--steps", "6"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert said.startswith("trainer")
    assert "trainer.n_gpus_per_node=1" in said.splitlines()[-1]

# SPDX-License-Identifier: Apache-2.0
"""A run's trace, asked by Perfetto's own trace processor: it has the planted seconds, and who led to what."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from trace_processor import Loaded, loaded

from recipe.async_engine.core.prompt_manager import Why
from recipe.async_engine.record.event_file import EventFile
from recipe.async_engine.record.events import (
    BEGINS,
    EMPTY,
    ENDS,
    GROUPS,
    RUN,
    SAMPLED,
    SCHEDULER,
    TOKENS,
    TRAINER,
    TRAJECTORIES,
    WEIGHTS,
    Class,
    Event,
)
from recipe.report.__main__ import main
from recipe.report.run import load

STEPS, STEP_S, ANSWERS = 5, 10.0, 3
REWARD_S, GATE_S, SYNC_S = 2.0, 3.0, 0.5

FAULTS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def step(number: int) -> list[Event]:
    """A batch of two groups, of which one waited for a reward; then the next version."""
    at = number * STEP_S
    events = [
        Event(TRAINER, "wait", at, at + 6),
        Event(TRAINER, "update", at + 6, at + 10 - SYNC_S),
        Event(TRAINER, "sync", at + 10 - SYNC_S, at + 10),
        Event(SCHEDULER, Why.GENERATING, at, at + 10 - GATE_S),
        Event(SCHEDULER, Why.GATE, at + 10 - GATE_S, at + 10),
        Event("rollout 0", Class.DECODING, at, at + 10 - GATE_S, 0.75),
        Event("rollout 0", Class.IDLE_PLACES, at, at + 10 - GATE_S, 0.25),
        Event("rollout 0", EMPTY, at + 10 - GATE_S, at + 10),
        Event(TOKENS, "0", at + 6, at + 6, version=number, tokens=30),
        Event(TOKENS, "1", at + 6, at + 6, version=number, tokens=10),
        Event(WEIGHTS, "stage", at + 9.5, at + 9.9, version=number + 1),
        Event(WEIGHTS, "swap", at + 9.9, at + 10, version=number + 1),
    ]
    for group in (2 * number, 2 * number + 1):
        for n in range(ANSWERS):
            sampled = at + 1 + n
            events += [
                Event(TRAJECTORIES, "generating", at, sampled, 1.0, number, group, n, 40 + n, "attempt 1"),
                Event(TRAJECTORIES, "reward", sampled, sampled + REWARD_S, 1.0, number, group, n),
            ]
        ended = at + 9
        events += [
            Event(GROUPS, "ready", at + 5, ended, 1.0, number, group),
            Event(GROUPS, "trained", at, ended, 1.0, number, group, tokens=120),
        ]
    return events


def record(folder: Path, events: list[list[Event]], **header: Any) -> EventFile:
    folder.mkdir()
    about = {"accelerators": {"trainer": 2, "rollout": 1}, "shared": False, "began": time.time(), "settings": {}}
    file = EventFile(folder, about | header)
    for batch in events:
        file.write(batch)
    return file


def traced(folder: Path) -> Path:
    path = folder / "trace.pftrace"
    assert main([str(folder), "--trace", str(path)]) == 0
    return path


def check_account(trace: Loaded, folder: Path) -> None:
    """The trace has the seconds of each device's each class, as the account has them."""
    account = load(folder).account
    expected = {
        (name, str(what)): value for name, device in account.devices.items() for what, value in device.seconds.items()
    }
    found = trace.account()
    assert {key: found.get(key, 0.0) for key in {*expected, *found}} == pytest.approx(
        {key: expected.get(key, 0.0) for key in {*expected, *found}}, abs=1e-3
    )
    assert trace.rows(FAULTS) == []


def test_queries_over_a_trace_find_the_planted_seconds(tmp_path: Path) -> None:
    record(tmp_path / "run", [step(number) for number in range(STEPS)]).close()
    with loaded(traced(tmp_path / "run")) as trace:
        check_account(trace, tmp_path / "run")
        found = trace.account()
        assert found["rollout 0", "wait_gate"] == pytest.approx(STEPS * GATE_S)
        assert found["rollout 0", "decoding"] == pytest.approx(STEPS * (STEP_S - GATE_S) * 0.75)
        assert found["trainer", "wait_weights"] == pytest.approx(STEPS * SYNC_S)
        rewards = trace.rows("select dur / 1e9 as s from slice where category = 'trajectory' and name = 'reward'")
        assert [row.s for row in rewards] == [REWARD_S] * STEPS * 2 * ANSWERS
        ages = trace.rows("select value from counter join track on track.id = track_id where name glob 'age of*'")
        assert [row.value for row in ages] == [0.25] * STEPS


def test_arrows_lead_from_a_prompt_over_its_answers_and_their_batch_to_a_version(tmp_path: Path) -> None:
    record(tmp_path / "run", [step(number) for number in range(STEPS)]).close()
    with loaded(traced(tmp_path / "run")) as trace:
        arrows = trace.rows(
            """
            select source.category as kind, source.name as name, target.category as next_kind, target.name as next,
                   extract_arg(target.arg_set_id, 'debug.group') as answer_group
            from flow join slice source on source.id = slice_out join slice target on target.id = slice_in
            """
        )
        steps = [(row.kind, row.name, row.next_kind, row.next) for row in arrows]
        assert steps.count(("group", "trained 6", "trajectory", "generating")) == ANSWERS
        answers = [row for row in arrows if row.kind == "group"]
        assert answers and all(row.name == f"trained {row.answer_group}" for row in answers)
        assert steps.count(("trajectory", "generating", "batch", "batch of version 3")) == 2 * ANSWERS
        assert steps.count(("batch", "batch of version 3", "version", "stage version 4")) == 1
        assert len(steps) == STEPS * (2 * ANSWERS + 2 * ANSWERS + 1)


def test_answers_that_overlap_are_apart_and_keep_their_lengths(tmp_path: Path) -> None:
    events = []
    for n in range(50):
        begin, sampled = 0.1 * n, 0.1 * n + 1 + (0.37 * n) % 5
        events += [
            Event(TRAJECTORIES, "reward", sampled, sampled + 0.5, 1.0, 0, n, 0),
            Event(TRAJECTORIES, "generating", begin, sampled, 1.0, 0, n, 0, 7, "attempt 1"),
        ]
    record(tmp_path / "run", [[*step(0)[:8], *events]]).close()
    with loaded(traced(tmp_path / "run")) as trace:
        rows = trace.rows(
            """
            select name, ts / 1e9 as start, dur / 1e9 as length, depth, track_id,
                   extract_arg(arg_set_id, 'debug.group') as n
            from slice where category = 'trajectory' order by ts
            """
        )
        assert len(rows) == 100 and {row.depth for row in rows} == {0}
        told = {(event.what, event.group): event for event in events}
        for row in rows:
            event = told[row.name, row.n]
            assert (row.start, row.length) == pytest.approx((event.start, event.end - event.start), abs=1e-6)
        tracks = {name: {row.n: row.track_id for row in rows if row.name == name} for name in ("generating", "reward")}
        assert tracks["generating"] == tracks["reward"]
        assert trace.rows(FAULTS) == []


def test_trace_of_a_killed_run_has_what_was_written_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = record(folder, [step(number) for number in range(STEPS)])
    whole = file.path.stat().st_size
    file.write(step(STEPS))
    # As a kill in the middle of a write leaves it.
    os.truncate(file.path, whole + (file.path.stat().st_size - whole) // 2)
    with loaded(traced(folder)) as trace:
        check_account(trace, folder)
        assert trace.account()["rollout 0", "wait_gate"] == pytest.approx(STEPS * GATE_S)


def test_what_nobody_recorded_is_not_known_and_a_replaced_device_ends(tmp_path: Path) -> None:
    events = [
        Event("rollout 0", Class.DECODING, 1.0, 4.0),
        Event("rollout 0", Class.DECODING, 6.0, 10.0),
        Event(RUN, ENDS, 12.0, 12.0, text="rollout 0"),
        Event(RUN, BEGINS, 12.0, 12.0, text="rollout 1"),
        Event(RUN, "joined", 12.0, 12.0, text="rollout 1"),
        Event(RUN, SAMPLED, 13.0, 13.0, text="rollout 1", tokens=7),
        Event("rollout 1", Class.DECODING, 15.0, 20.0),
        Event(TRAINER, "update", 0.0, 20.0),
    ]
    record(tmp_path / "run", [events]).close()
    with loaded(traced(tmp_path / "run")) as trace:
        check_account(trace, tmp_path / "run")
        found = trace.account()
        assert found["rollout 0", "not_known"] == pytest.approx(4.0)
        assert found["rollout 1", "start_up"] == pytest.approx(3.0)
        changes = trace.rows("select name, ts / 1e9 as at from slice where category = 'device' order by name")
        assert [row.name for row in changes] == ["begins rollout 1", "ends rollout 0", "joined rollout 1"]
        assert {row.at for row in changes} == {12.0}


def test_nothing_after_the_end_is_in_the_account(tmp_path: Path) -> None:
    """The trainer's last step has ended at 8 s; it is asked twice more until the run is over."""
    spans = (("update", 0.0, 7.0), ("other", 7.0, 9.0), ("other", 10.0, 11.0))
    record(tmp_path / "run", [[Event(TRAINER, *span) for span in spans]]).close()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"account": {"duration": 8.0}}))
    with loaded(traced(tmp_path / "run")) as trace:
        check_account(trace, tmp_path / "run")
        assert trace.account() == {("trainer", "training"): 7.0, ("trainer", "wait_driver"): 1.0}


def test_a_folder_without_a_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--trace", str(tmp_path / "trace")]) == 2
    assert "has no record of events" in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()

# SPDX-License-Identifier: Apache-2.0
"""The record of a run is written as it happens, of real actors that are asked, die and are replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from trace_processor import loaded

from recipe.async_engine.config.plan import derive
from recipe.async_engine.record.event_file import EventFile, events_of, files, read
from recipe.async_engine.record.events import (
    GROUPS,
    JOINED,
    LOST,
    ROLLOUT,
    SAMPLED,
    TRAINER,
    Class,
    Devices,
    Event,
    Lane,
    TokenBooks,
    ignore,
)
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.trainer.record_stage import RecordStage
from recipe.async_engine.trainer.recording import GROUPS_IN_FULL, Recording, is_kept
from recipe.report.__main__ import main as report
from recipe.report.account import account_of
from recipe.report.run import load

SOON = 30.0
DEVICES = Devices({TRAINER: 1, ROLLOUT: 1})


def make_engine(ahead: float) -> Any:
    """An actor with a lane of its own, whose clock is ``ahead`` of this process's."""

    class Engine:  # made here, so that Ray sends it by value: its processes cannot import test modules
        def __init__(self) -> None:
            from uuid import uuid4

            self._clock = lambda: time.monotonic() + ahead
            self._lane = Lane(self._clock, Class.START_UP)
            self._life = uuid4().hex

        def turn_to(self, what: str) -> None:
            self._lane.turn_to(what)

        def activity(self) -> Any:
            from recipe.async_engine.record.events import Activity

            spans = self._lane.take()
            return Activity(self._clock(), self._life, spans, {"sampled": 3, "answered": 2})

    engine = ray.remote(num_cpus=0)(Engine).remote()
    ray.get(engine.turn_to.remote(Class.START_UP), timeout=SOON)
    return engine


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def recorded(folder: Path) -> list[Event]:
    return events_of(read(files(folder)[-1])[1])


def test_devices_on_other_clocks_die_and_are_replaced_and_the_account_closes(cluster: None, tmp_path: Path) -> None:
    """One clock is two seconds ahead, one an hour behind."""
    began = time.monotonic()
    parts = {"rollout 0": make_engine(2.0), "rollout 1": make_engine(-3600.0)}
    recording = Recording(str(tmp_path), DEVICES, {"mode": "test"}, lambda: parts)
    trainer = Lane(time.monotonic, "wait")
    recording.follow(TRAINER, trainer)
    recording.ask()
    asked = time.monotonic()
    for engine in parts.values():
        ray.get(engine.turn_to.remote(Class.DECODING), timeout=SOON)
    decoding = time.monotonic()
    trainer.turn_to("update")
    assert recording.engine_tokens() == {"sampled": 6, "answered": 4}
    time.sleep(1.0)
    # Of a device that dies, what it had said is known.
    until(lambda: recording._known["rollout 1"].known_until > decoding - recording._began + 0.6)
    ray.kill(parts["rollout 1"])
    until(lambda: recording.deaths == 1)
    assert recording.engine_tokens() is None
    parts = {"rollout 0": parts["rollout 0"], "rollout 2": make_engine(7.0)}
    ray.get(parts["rollout 2"].turn_to.remote(Class.PREFILL), timeout=SOON)
    until(lambda: "rollout 2" in recording._known and bool(recording._known["rollout 2"].life))
    ray.get(parts["rollout 2"].turn_to.remote(Class.DECODING), timeout=SOON)
    time.sleep(0.5)
    ended = time.monotonic()
    account = account_of(recording.close(ended, TokenBooks()))
    assert account.closes, account
    assert account.duration == pytest.approx(ended - began, abs=SOON)
    devices = account.devices
    assert devices.keys() == {TRAINER, "rollout 0", "rollout 1", "rollout 2"}
    assert max(device.not_known for device in devices.values()) <= 0.01 * account.duration
    slack = asked - began
    for device in ("rollout 0", TRAINER):
        what = Class.DECODING if device != TRAINER else Class.TRAINING
        assert devices[device].seconds[what] == pytest.approx(ended - decoding, abs=slack + 0.2)
    lost = devices["rollout 1"].seconds
    assert lost[Class.DECODING] > 0.5 and lost[Class.DOWN] > 0
    # What the dead one left and what came in its place are one accelerator's life.
    assert devices["rollout 1"].life + devices["rollout 2"].life == pytest.approx(account.duration)
    # The report's account is this one, and in the trace it happens when it happened here.
    reported = load(tmp_path).account.total
    for what in reported.keys() | account.total.keys():
        assert reported.get(what, 0.0) == pytest.approx(account.total.get(what, 0.0), abs=0.05), what
    assert report([str(tmp_path), "--trace", str(tmp_path / "trace")]) == 0
    with loaded(tmp_path / "trace") as trace:
        rows = trace.rows(
            """
            select extract_arg(arg_set_id, 'debug.device') as device, name, min(ts) / 1e9 as start,
                   sum(dur) / 1e9 as seconds
            from slice where category = 'account' group by 1, 2
            """
        )
    traced = {(row.device, row.name): row for row in rows}
    for device, what in (("rollout 0", Class.DECODING), (TRAINER, Class.TRAINING)):
        assert traced[device, what].start == pytest.approx(decoding - began, abs=slack + 0.2)
        assert traced[device, what].seconds == pytest.approx(devices[device].seconds[what], abs=0.05)
    news = [event for event in recorded(tmp_path) if event.lane == "run"]
    assert {(event.text, event.tokens) for event in news if event.what == SAMPLED} == {
        ("rollout 0", 3),
        ("rollout 2", 3),
    }
    assert {(event.what, event.text) for event in news if event.what != SAMPLED} == {
        (LOST, "rollout 1"),
        ("ends", "rollout 1"),
        ("begins", "rollout 2"),
        (JOINED, "rollout 2"),
    }


@pytest.mark.parametrize("missed", [False, True], ids=["at once", "after the list of parts lacked it"])
def test_server_that_is_started_again_in_its_place_goes_on_in_its_account(
    cluster: None, tmp_path: Path, missed: bool
) -> None:
    parts = {"rollout 0": make_engine(0.0)}
    recording = Recording(str(tmp_path), DEVICES, {}, lambda: parts)
    recording.ask()
    ray.get(parts["rollout 0"].turn_to.remote(Class.DECODING), timeout=SOON)
    ray.kill(parts["rollout 0"])
    until(lambda: recording.deaths == 1)
    if missed:
        del parts["rollout 0"]
        until(lambda: not recording._known)
    parts["rollout 0"] = make_engine(100.0)
    until(lambda: "rollout 0" in recording._known and not recording._known["rollout 0"].down)
    ray.get(parts["rollout 0"].turn_to.remote(Class.PREFILL), timeout=SOON)
    time.sleep(0.3)
    ended = time.monotonic()
    account = account_of(recording.close(ended, TokenBooks()))
    assert account.closes
    assert recording.deaths == 1
    assert account.devices["rollout 0"].life == pytest.approx(account.duration)
    seconds = account.devices["rollout 0"].seconds
    assert seconds[Class.DOWN] > 0 and seconds[Class.PREFILL] >= 0.25
    assert account.devices["rollout 0"].not_known <= 0.01 * account.duration


def test_record_is_on_disk_while_the_run_goes_on(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill would leave it."""
    monkeypatch.setattr("recipe.async_engine.trainer.recording.RECORD_WRITE_S", 0.1)
    recording = Recording(str(tmp_path), DEVICES, {}, dict)
    recording.follow(TRAINER, Lane(time.monotonic, "wait"))
    now = time.monotonic()
    for group in (0, GROUPS_IN_FULL, GROUPS_IN_FULL + 1):
        recording.tell(Event(GROUPS, "trained", now, now, group=group))
    until(lambda: {event.lane for event in recorded(tmp_path)} == {GROUPS, TRAINER})
    assert [event.group for event in recorded(tmp_path) if event.lane == GROUPS] == [0, GROUPS_IN_FULL]
    recording.close(time.monotonic(), None)


@pytest.mark.parametrize("events", [True, False])
def test_run_without_a_record_goes_on_and_has_no_account(events: bool, tmp_path: Path) -> None:
    """It is not asked for, or there is no place for it."""
    (tmp_path / "events").touch()
    trainer = {"default_local_dir": str(tmp_path), "nnodes": 1, "n_gpus_per_node": 1, "total_training_steps": 1}
    rollout = {"actor": {"ppo_mini_batch_size": 2}, "rollout": {"n": 2}}
    config = {"trainer": trainer, "actor_rollout_ref": rollout, "async_training": {"events": events}}
    timeline = Timeline(time.monotonic)
    stage = RecordStage(OmegaConf.create(config), derive(config), timeline, list, list)
    assert timeline.listener is ignore
    stage.end(None, failed=False)
    assert stage.recorded is None
    assert files(tmp_path) == []


def test_of_many_groups_ever_fewer_are_kept() -> None:
    assert all(is_kept(group) for group in range(GROUPS_IN_FULL))
    kept = sum(is_kept(group) for group in range(100 * GROUPS_IN_FULL))
    assert 3 * GROUPS_IN_FULL < kept < 8 * GROUPS_IN_FULL


def test_parts_that_cannot_be_asked_end_no_run(tmp_path: Path) -> None:
    failing = True

    def parts() -> dict[str, Any]:
        if failing:
            raise RuntimeError("a replica is being replaced")
        return {}

    recording = Recording(str(tmp_path), DEVICES, {}, parts)
    recording.ask()
    failing = False
    assert account_of(recording.close(time.monotonic(), None)).devices == {}


def test_a_write_that_does_not_return_keeps_no_run_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a network disk that has gone; the account is of what was written before."""
    for name, seconds in (("RECORD_WRITE_S", 0.1), ("ASK_S", 0.01), ("TOLD_S", 0.05)):
        monkeypatch.setattr(f"recipe.async_engine.trainer.recording.{name}", seconds)
    recording = Recording(str(tmp_path), DEVICES, {}, dict)
    now = time.monotonic()
    recording.tell(Event(TRAINER, "wait", now, now + 0.01))
    until(lambda: bool(recorded(tmp_path)))
    writing, gone = threading.Event(), threading.Event()
    monkeypatch.setattr(EventFile, "write", lambda *_: writing.set() or gone.wait(SOON))
    assert writing.wait(SOON)
    try:
        assert recording.engine_tokens() is None
        assert account_of(recording.close(time.monotonic(), None)).devices.keys() == {TRAINER}
    finally:
        gone.set()
    assert "a write to" in caplog.text

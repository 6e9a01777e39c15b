# SPDX-License-Identifier: Apache-2.0
"""verl's trackers, read back from their own files: the last row, the summary and the status, however a run ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tracker_files
import wandb
from wandb.sdk.data_types._private import MEDIA_TMP

from recipe.async_engine.core.alarms import Alarms
from recipe.async_engine.trainer.trackers import MLFLOW_FILE, TrackerFailed, Trackers

HERE = Path(__file__).parent
SCORE = "critic/score/mean"
LIMIT_S = 60.0
ACCOUNT: dict[str, Any] = {
    "steps": 2,
    "versions": 1,
    "stopped_by": None,
    "validation": {"first": 0.25, "last": 0.75},
    "alarms": {},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, value in tracker_files.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    # W&B makes its folder for media once in a process, and other tests of this process may remove it.
    monkeypatch.setattr(MEDIA_TMP, "name", str(tmp_path / "media"))
    Path(MEDIA_TMP.name).mkdir()
    yield tmp_path
    wandb.teardown()


def trackers(folder: Path, names: Any = tuple(tracker_files.NAMES), step: int = 0) -> Trackers:
    return Trackers(names, tracker_files.PROJECT, "run", {"trainer": {"seed": 1}}, folder, step, LIMIT_S)


def train(of: Trackers, first: int, last: int) -> None:
    for step in range(first, last + 1):
        of.log({SCORE: step / 10}, step)


@pytest.mark.parametrize("how", ["ends", "fails", "is stopped", "has alarms"])
def test_trackers_have_the_last_row_how_the_run_ended_and_its_status(folder: Path, how: str) -> None:
    error = (
        {"name": "RolloutFailed", "message": "no replica is left " * 900, "traceback": "..."}
        if how == "fails"
        else None
    )
    alarms = Alarms({})
    alarms.note("empty_answers", how == "has alarms")
    account = {**ACCOUNT, "stopped_by": "SIGTERM" if how == "is stopped" else None, "alarms": alarms.summary()}
    run = trackers(folder)
    train(run, 0, 2)
    # The last validation of a run whose data end has the step of the row before.
    run.log({"val-core/task/mean@1": 0.75}, 2)
    run.finish(account, error, LIMIT_S)
    run.finish(account, {"name": "Other", "message": "it has been said how it ended"}, LIMIT_S)

    expected: dict[str, Any] = {
        "run/ended": {"fails": "failed", "has alarms": "with_alarms"}.get(how, "well"),
        "run/steps": 2,
        "run/versions": 1,
        "run/validation_first": 0.25,
        "run/validation_last": 0.75,
    }
    expected |= {"run/error": ("RolloutFailed: " + "no replica is left " * 900)[:1000]} if how == "fails" else {}
    expected |= {"run/stopped_by": "SIGTERM"} if how == "is stopped" else {}
    expected |= {"run/alarms": "empty_answers 1"} if how == "has alarms" else {}
    in_words = {name: str(value) for name, value in expected.items()}
    tensorboard = tracker_files.of_tensorboard(folder, SCORE)
    (of_mlflow,), (of_wandb,) = tracker_files.of_mlflow(folder, SCORE), tracker_files.of_wandb(folder)
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 2] and lines[-1]["data"] == expected
    assert tensorboard.ended == of_mlflow.ended == in_words
    assert of_wandb.ended == expected
    for told in (tensorboard, of_mlflow, of_wandb):
        assert {step: row[SCORE] for step, row in told.rows.items()} == pytest.approx({0: 0.0, 1: 0.1, 2: 0.2})
    assert of_wandb.rows[2]["val-core/task/mean@1"] == 0.75
    assert (of_wandb.status, of_mlflow.status) == ((1, "FAILED") if how == "fails" else (0, "FINISHED"))
    assert not (folder / MLFLOW_FILE).exists()


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_trackers import train, trackers
run = trackers(Path(sys.argv[1]))
train(run, 0, 7)
import time
while any(tracker._asked.qsize() for tracker in run._trackers):
    time.sleep(0.1)
time.sleep(3)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_and_resumed_has_each_row_once_and_both_starts_their_status(folder: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(HERE), str(HERE.parent)],
        env=dict(os.environ),
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    with open(folder / "rows.jsonl", "a") as rows:
        rows.write('{"step": 3, "data"')
    run = trackers(folder, step=4)
    train(run, 5, 9)
    run.finish(ACCOUNT, None, LIMIT_S)

    def scores(told: tracker_files.Told) -> dict[int, float]:
        return {step: row[SCORE] for step, row in told.rows.items()}

    whole = {step: step / 10 for step in range(10)}
    assert scores(tracker_files.of_file(folder)) == pytest.approx(whole)
    assert scores(tracker_files.of_tensorboard(folder, SCORE)) == pytest.approx(whole)
    before, after = tracker_files.of_mlflow(folder, SCORE)
    assert (before.status, after.status) == ("KILLED", "FINISHED")
    assert scores(before) == pytest.approx({step: step / 10 for step in range(8)})
    assert scores(after) == pytest.approx({step: step / 10 for step in range(5, 10)})
    before, after = tracker_files.of_wandb(folder)
    assert (before.status, after.status) == (None, 0), "W&B shows a run that was told of no end as crashed"
    # W&B keeps a row until the next one.
    assert scores(before) == pytest.approx({step: step / 10 for step in range(7)})
    assert scores(after) == pytest.approx({step: step / 10 for step in range(5, 10)})
    assert [told.ended.get("run/ended") for told in (before, after)] == [None, "well"]

    # A damaged note, or one of another server's run, costs an earlier run its status and nothing else.
    (folder / MLFLOW_FILE).write_text('{"run_id": "of another server"}')
    # Resumed once more, after an end: what the last start said of its end is of no row.
    run = trackers(folder, ["file", "mlflow"], step=9)
    run.log({SCORE: 1.0}, 10)
    run.finish(ACCOUNT, None, LIMIT_S)
    assert scores(tracker_files.of_file(folder)) == pytest.approx({**whole, 10: 1.0})

    # Begun anew, without a checkpoint: nothing of what was there before is of this training.
    run = trackers(folder, ["file", "tensorboard"])
    train(run, 0, 3)
    run.finish(ACCOUNT, None, LIMIT_S)
    for told in (tracker_files.of_file(folder), tracker_files.of_tensorboard(folder, SCORE)):
        assert scores(told) == pytest.approx({step: step / 10 for step in range(4)})


class Hanging(ModuleType):
    """A stand-in for trackio, whose service does not answer from the second row on."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.context_vars = SimpleNamespace(current_run=ContextVar("run", default=None))
        self.threads: set[int] = set()
        self.rows: list[int] = []

    def init(self, **settings: Any) -> None:
        self.context_vars.current_run.set(settings["name"])
        self.threads.add(threading.get_ident())

    def log(self, data: dict[str, Any], step: int) -> None:
        assert self.context_vars.current_run.get() == "run", "Trackio knows its run by the context"
        self.rows.append(step)
        if step >= 2:
            threading.Event().wait()


class Refusing(ModuleType):
    """A stand-in for SwanLab, whose service takes nothing and raises whatever it likes."""

    def __init__(self) -> None:
        super().__init__("swanlab")

    def init(self, **settings: Any) -> None:
        """It is there at first."""

    def log(self, data: dict[str, Any], step: int) -> None:
        raise SystemExit("no route to the service")

    def finish(self) -> None:
        raise ConnectionError("no route to the service")


def test_trackers_that_hang_or_raise_cost_nobody_else_and_are_named_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging()
    monkeypatch.setitem(sys.modules, "trackio", hanging)
    monkeypatch.setitem(sys.modules, "swanlab", Refusing())
    began = time.monotonic()
    with caplog.at_level(logging.ERROR):
        run = trackers(folder, ["trackio", "swanlab", "file"])
        for first in range(1, 5000, 500):
            train(run, first, first + 499)
            # One that works is not to be behind on a busy machine. Its last line may be half written.
            while (folder / "rows.jsonl").read_text().count("\n") < first + 499:
                assert time.monotonic() - began < LIMIT_S
                time.sleep(0.01)
        run.finish(ACCOUNT, None, 0.5)
    assert time.monotonic() - began < LIMIT_S
    assert hanging.rows == [1, 2]
    told = tracker_files.of_file(folder)
    assert len(told.rows) == 5000 and told.ended["run/ended"] == "well"
    behind, left, refused = (
        next(said for said in caplog.messages if words in said) for words in ("behind", "does not wait", "route")
    )
    assert "tracker trackio is 4096 rows behind" in behind
    assert "tracker trackio" in left and "async_training.timeouts.stop" in left
    assert "tracker swanlab does not take step 1" in refused
    assert sum(record.name == "recipe.async_engine.trainer.trackers" for record in caplog.records) == 3


@pytest.mark.parametrize("fault", [ImportError("no module named trackio"), SystemExit(1), ValueError("no key")])
def test_tracker_that_cannot_be_set_up_refuses_the_start_and_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    broken = Hanging()
    monkeypatch.setattr(broken, "init", lambda **settings: (_ for _ in ()).throw(fault), raising=False)
    monkeypatch.setitem(sys.modules, "trackio", broken)
    with pytest.raises(TrackerFailed, match=f"trainer.logger: trackio cannot be set up: {type(fault).__name__}"):
        trackers(folder, ["file", "wandb", "trackio"])
    (told,) = tracker_files.of_wandb(folder)
    assert (told.status, told.ended["run/ended"]) == (1, "failed"), "the others are not left open"


def test_answers_of_a_validation_reach_the_trackers_that_take_them(folder: Path) -> None:
    run = trackers(folder)
    run.generations.log(["mlflow", "wandb", "tensorboard", "console"], [("2 + 2", "4", 1.0)], 3)
    run.log({SCORE: 0.5}, 3)
    run.finish(ACCOUNT, None, LIMIT_S)
    (of_wandb,), (of_mlflow,) = tracker_files.of_wandb(folder), tracker_files.of_mlflow(folder, SCORE)
    assert "val/generations" in "".join(of_wandb.rows[3]), "one row has both"
    assert of_wandb.rows[3][SCORE] == 0.5
    assert of_mlflow.status == "FINISHED", "its answers are of the same run"

# SPDX-License-Identifier: Apache-2.0
"""A run is followed from another process: as it goes, to its end, its death, and from before it begins."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.async_engine.core.alarms import Alarms
from recipe.async_engine.record import run_record as record
from recipe.report import follow as following
from recipe.report.follow import ENDED, FAILED, NONE_BEGAN, WITH_ALARMS, Follower, follow

SOON = 60.0
# A run as far as its folder shows it: it does what it is told, a line each.
RUN = """
import json, os, sys
from pathlib import Path
from recipe.async_engine.record.events import SCHEDULER, TRAINER, Event
from recipe.async_engine.record.event_file import EventFile
from recipe.async_engine.record.owner import RUN, Owner

folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
owner = Owner(folder, RUN)
file = EventFile(folder, {})
step = 0
for told in map(str.strip, sys.stdin):
    if told == "step":
        step += 1
        at = 10.0 * step
        file.write([Event(TRAINER, "start_up", 0, 10)] * (step == 1) + [
            Event(TRAINER, "wait", at, at + 2.5), Event(TRAINER, "update", at + 2.5, at + 10),
            Event(SCHEDULER, "gate", at, at + 10)])
        with open(folder / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps({"training/global_step": step, "critic/score/mean": 0.5,
                "fully_async/rollouter/generating_trajectories": 14, "fully_async/rollouter/slots": 16,
                "fully_async/staleness/bound": 1}) + "\\n")
    if told == "half a line":
        with open(folder / "metrics.jsonl", "a") as metrics:
            metrics.write('{"training/global_step": 99')
    if told in ("end", "fail"):
        error = {"name": "NoReplicaLeft", "message": "all died"} if told == "fail" else None
        (folder / "summary.json").write_text(json.dumps(
            {"steps": step, "versions": step, "wall_seconds": 60.0, "error": error}))
        owner.release()
    print(told, flush=True)
"""


class Run:
    """Drives the process of a run."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", RUN, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{what}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(following, "POLL_S", 0.02)
    monkeypatch.setattr(following, "LINES_S", 0.0)
    return tmp_path / "run"


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    run = Run(folder)
    yield run
    run.process.kill()
    run.process.wait(SOON)


def test_lines_come_as_the_run_goes_and_end_with_it(folder: Path, run: Run) -> None:
    run.tell("step")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "step 1," in line:
            run.tell("step")
        elif "step 2," in line:
            run.tell("half a line")
            run.tell("end")

    assert follow(folder, SOON, say) == ENDED
    assert [line.split(" ", 1)[1] for line in said if " step " in line and ":" not in line.split(" ", 1)[1]] == [
        "step 1, reward 0.5",
        "step 2, reward 0.5",
    ]
    assert any(line.endswith("trainer: update; update 75%, wait 25%; step 1") for line in said)
    assert any(line.endswith("rollout: gate; 14 of 16 slots") for line in said)
    assert any(line.endswith("staleness: bound 1") for line in said)
    assert said[-1] == "the run ended: steps 2, versions 2, 60 s"


def test_run_that_failed_says_with_what(folder: Path, run: Run) -> None:
    for told in ("step", "fail"):
        run.tell(told)
    said: list[str] = []
    assert follow(folder, SOON, said.append) == FAILED
    assert said[-2:] == ["the run failed: steps 1, versions 1, 60 s", "NoReplicaLeft: all died"]


def test_run_that_ended_with_alarms_says_which_and_has_a_status_of_its_own(folder: Path) -> None:
    alarms, said = Alarms({}), list[str]()
    alarms.note("empty_answers", True)
    folder.mkdir()
    summary = {"error": None, "steps": 2, "versions": 2, "wall_seconds": 60, "alarms": alarms.summary()}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert follow(folder, SOON, said.append) == WITH_ALARMS == record.WITH_ALARMS
    assert said[-2] == "the run ended with alarms: steps 2, versions 2, 60 s"
    assert said[-1].startswith("alarm empty_answers, 1 steps: at least half of the answers")


def test_killed_run_is_seen_to_have_been(folder: Path, run: Run) -> None:
    run.tell("step")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "step 1," in line:
            run.process.kill()
            run.process.wait(SOON)

    assert follow(folder, SOON, say) == FAILED
    assert said[-1].startswith("the run was killed")


def test_run_is_waited_for_and_what_follows_in_the_folder_is_followed_on(folder: Path) -> None:
    said: list[str] = []
    runs: list[Run] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("no run has begun"):
            runs.append(Run(folder))
            threading.Thread(target=lambda: [runs[0].tell(told) for told in ("step", "end")]).start()

    assert follow(folder, SOON, say) == ENDED
    assert said[0] == f"no run has begun in {folder}; waiting for one up to 60 s (--wait)"
    assert said[-1].startswith("the run ended: steps 1")
    runs[0].process.kill()
    runs[0].process.wait(SOON)


def test_nothing_to_follow_is_said_after_the_wait(folder: Path) -> None:
    said: list[str] = []
    assert follow(folder, 0.1, said.append) == NONE_BEGAN
    assert "no run has begun" in said[-1] and "--wait" in said[-1] and "default_local_dir" in said[-1]


def test_lines_that_a_resumed_run_wrote_anew_are_taken_in_from_the_next_whole_one(folder: Path) -> None:
    folder.mkdir()
    metrics, follower = folder / "metrics.jsonl", Follower(folder)
    metrics.write_text('{"training/global_step": 1}\n')
    assert follower.look()
    metrics.write_text('{"training/global_step": 1, "critic/score/mean": 0.5}\n{"training/global_step": 2}\n')
    assert follower.look()
    assert [step["training/global_step"] for step in follower.steps] == [1, 2]


def test_ctrl_c_ends_it_cleanly(folder: Path, run: Run) -> None:
    run.tell("step")
    command = [sys.executable, "-m", "recipe.report", str(folder), "--follow"]
    # Whoever started these tests may ignore the signal, and what they start inherits that.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **heard) as follower:
        assert follower.stdout is not None and follower.stderr is not None
        assert follower.stdout.readline().startswith("following")
        assert "step 1" in follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        assert follower.wait(SOON) == 128 + signal.SIGINT
        assert follower.stderr.read() == ""
    assert run.process.poll() is None

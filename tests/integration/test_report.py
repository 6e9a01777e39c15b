# SPDX-License-Identifier: Apache-2.0
"""A run's report is one file with everything in it, of a run that ended, was killed or goes on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recipe.async_engine.core.alarms import Alarms
from recipe.async_engine.core.prompt_manager import Why
from recipe.async_engine.record.event_file import EventFile
from recipe.async_engine.record.events import (
    EMPTY,
    GROUPS,
    RUN,
    SCHEDULER,
    TOKENS,
    TRAINER,
    TRAJECTORIES,
    WEIGHTS,
    Class,
    Event,
)
from recipe.report import charts
from recipe.report.__main__ import main
from recipe.report.charts import COLORS
from recipe.report.page import what_happened
from recipe.report.run import load, speeds

STEPS, STEP_S = 6, 4
CHARTS = 14


def run_of(
    folder: Path,
    ago: float = 0.0,
    summary: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    waits: float = 2.0,
) -> EventFile:
    """A run of six steps of 4 s: in each the trainer waits first, and at its end the gate holds the engine."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"accelerators": {"trainer": 2, "rollout": 1}, "shared": False, "settings": settings or {}}
    header = {**about, "began": time.time() - ago}
    file = EventFile(folder, header)
    for step in range(STEPS):
        at = step * STEP_S
        file.write(
            [
                Event(TRAINER, "wait", at, at + waits),
                Event(TRAINER, "update", at + waits, at + 4),
                Event(SCHEDULER, Why.GENERATING, at, at + 3),
                Event(SCHEDULER, Why.GATE, at + 3, at + 4),
                Event("rollout 0", Class.DECODING, at, at + 3, 0.75),
                Event("rollout 0", Class.IDLE_PLACES, at, at + 3, 0.25),
                Event("rollout 0", EMPTY, at + 3, at + 4),
                Event(TRAJECTORIES, "generating", at, at + 2, 1.0, step, step, 0, 40 + step, "attempt 1"),
                Event(TRAJECTORIES, "reward", at + 2, at + 3, 1.0, step, step, 0),
                Event(GROUPS, "ready", at + 3, at + 4, 1.0, step, step),
                Event(GROUPS, "trained", at, at + 4, 1.0, step, step, None, 40),
                Event(TOKENS, "1", at, at, version=step, tokens=40),
                Event(WEIGHTS, "swap", at + 3.5, at + 4, version=step + 1),
            ]
        )
    file.write([Event(RUN, "lost", 5.0, 5.0, text="rollout 0")])
    line = {"critic/rewards/mean": 0.5, "fully_async/staleness/token_mean": 1.0, "rollout_corr/kl": 0.1}
    with open(folder / "metrics.jsonl", "w") as metrics:
        for step in range(STEPS):
            metrics.write(json.dumps({"training/global_step": step + 1, "wall_seconds": step * STEP_S, **line}) + "\n")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return file


def page(folder: Path) -> str:
    assert main([str(folder)]) == 0
    return (folder / "report.html").read_text()


def test_report_of_a_run_that_ended_has_its_account_its_advice_and_every_chart(tmp_path: Path) -> None:
    tokens = {"sampled": 240, "trained": 240, "not_known": 0}
    run_of(tmp_path, summary={"error": None, "account": {"duration": 24.0, "tokens": tokens}}).close()
    text = page(tmp_path)
    assert f"The run ended after {STEPS} steps and 24.0 s. Useful, without the start-up: trainer 50%, rollout 5" in text
    assert "most of the rest was wait batch" in text
    assert "accelerator-seconds, which close" in text
    assert text.index("<b>wait batch</b>: ") < text.index("<b>wait gate</b>: ")
    assert "240" in text and "rollout 0" in text
    documents = re.findall(r"const docs_json = '(.*)';", text)
    assert len(documents) == 1
    models = json.loads(documents[0].encode().decode("unicode_escape"))
    (document,) = models.values()
    assert len(document["roots"]) == CHARTS == len(re.findall(r"data-root-id=", text))


def test_report_says_the_three_lines_that_matter_and_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, summary={"error": None, "account": {"duration": 24.0}}).close()
    assert main([str(tmp_path)]) == 0
    happened, account, advice, where = capsys.readouterr().out.splitlines()
    assert happened.startswith(f"The run ended after {STEPS} steps")
    assert account == "accelerators: wait batch 33%, training 33%, decoding 19%, wait gate 8%, idle places 6%"
    assert advice.startswith("advice: the engines are busy") and "rollout.n_gpus_per_node" in advice
    assert where == str(tmp_path / "report.html")


def test_two_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "before" / "run", tmp_path / "after" / "run"
    run_of(first, settings={"max_staleness": 1, "publish": "beside"}).close()
    run_of(second, settings={"max_staleness": 2, "publish": "beside"}, waits=0.5).close()
    assert main([str(first), str(second)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(second / "compared.html")
    text = (second / "compared.html").read_text()
    assert "<code>max_staleness</code></td>" in text and "<code>publish</code></td>" not in text
    # The trainer waited 1.5 s less in each step, on two accelerators: what differs most is first.
    rows = re.findall(r"</span> ([a-z ]+)</td><td[^>]*>([\d.]+)</td><td[^>]*>([\d.]+)</td><td[^>]*>([+-][\d.]+)", text)
    assert rows[:2] == [("training", "4.000", "7.000", "+3.000"), ("wait batch", "4.000", "1.000", "-3.000")]
    # Both are called "run".
    assert "A: run: critic/rewards/mean" in text and "B: run: critic/rewards/mean" in text
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)


def test_lane_of_versions_says_which_one_generates(tmp_path: Path) -> None:
    run_of(tmp_path).close()
    lane = charts.versions(load(tmp_path))
    assert [row[1:4] for row in lane] == [
        (0.0, 4.0, "version 0"),
        *[(4.0 * version, 4.0 * version + 4, f"version {version}") for version in range(1, STEPS)],
        (24.0, 24.0, f"version {STEPS}"),
    ]


def test_a_slow_engine_is_seen_by_its_tokens(tmp_path: Path) -> None:
    file = run_of(tmp_path)
    counts = [(0.0, 0), (5.0, 300), (6.0, 60), (24.0, 1320)]
    # It was started again in between, and counted from 0.
    file.write([Event(RUN, "sampled", at, at, text="rollout 0", tokens=count) for at, count in counts])
    file.close()
    decoding = STEPS * 3 * 0.75
    assert speeds(load(tmp_path)) == {"rollout 0": pytest.approx((300 + 1320) / decoding)}


def test_every_class_has_a_color() -> None:
    assert COLORS.keys() == set(Class)


def test_report_asks_no_network_for_anything(tmp_path: Path) -> None:
    run_of(tmp_path).close()
    text = page(tmp_path)
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)
    assert text.count("<html") == 1 and 'name="viewport"' in text
    assert len(text) < 10e6


def test_run_that_goes_on_one_that_was_killed_and_one_that_failed_are_told_apart(tmp_path: Path) -> None:
    goes_on, killed, failed = (tmp_path / name for name in ("goes_on", "killed", "failed"))
    run_of(goes_on, ago=STEPS * STEP_S)
    file = run_of(killed, ago=3600.0)
    # In the middle of a batch.
    content = file.path.read_bytes()
    file.path.write_bytes(content[: len(content) * 2 // 3])
    run_of(failed, summary={"error": {"name": "NoReplicaLeft", "message": "all <dead>"}})
    assert what_happened(load(goes_on)).startswith(f"The run goes on after {STEPS} steps")
    assert what_happened(load(killed)).startswith(f"The run was killed after {STEPS} steps")
    assert load(killed).until < STEPS * STEP_S
    assert "failed (NoReplicaLeft: all &lt;dead&gt;)" in page(failed)
    for folder in (goes_on, killed, failed):
        run = load(folder)
        assert run.account.closes
        assert page(folder)


def test_alarms_are_on_the_page_of_a_run_that_ended_and_of_one_that_goes_on(tmp_path: Path) -> None:
    alarms = Alarms({})
    for _ in range(3):
        alarms.note("uniform_rewards", True)
    run_of(tmp_path, summary={"error": None, "ended": "with_alarms", "alarms": alarms.summary()}).close()
    text = page(tmp_path)
    assert "with alarms (uniform_rewards 3)" in text
    assert "<h2>Alarms</h2>" in text and "all had the same reward (3 steps in a row). Look at the reward" in text
    going = tmp_path / "going"
    run_of(going)
    assert "Alarms" not in page(going)
    with open(going / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"training/global_step": STEPS + 1, **alarms.metrics()}) + "\n")
    assert "with alarms (uniform_rewards 3)" in page(going)


def test_way_that_a_rehearsal_fell_back_to_is_said(tmp_path: Path) -> None:
    setting = "async_training.weights.publish=inline"
    run_of(tmp_path, summary={"error": None, "rehearsal": {"fallbacks": [setting]}}).close()
    assert f"s, with {setting} since its rehearsal. Useful" in what_happened(load(tmp_path))


def test_newest_start_of_a_run_is_reported(tmp_path: Path) -> None:
    run_of(tmp_path).close()
    file = EventFile(tmp_path, {"accelerators": {"trainer": 1}, "shared": False, "began": time.time()})
    file.write([Event(TRAINER, "update", 1.0, 3.0)])
    file.close()
    run = load(tmp_path)
    assert run.until == 3.0
    assert run.account.devices.keys() == {TRAINER}
    assert page(tmp_path)


def test_start_that_fails_before_it_has_a_record_is_not_taken_for_the_recorded_one(tmp_path: Path) -> None:
    error = {"name": "ConfigError", "message": "no such model"}
    run_of(tmp_path, ago=3600, summary={"began": time.time(), "error": error, "account": None}).close()
    run = load(tmp_path)
    assert (run.state, run.until, run.summary) == ("was killed", STEPS * STEP_S, {})
    assert "a later start wrote no events: no such model" in what_happened(run)


@pytest.mark.parametrize("files", [[], ["0000.arrow"]])
def test_folder_without_a_record_is_refused_in_words(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events").mkdir()
    for name in files:
        (tmp_path / "events" / name).touch()
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert ("no events yet" if files else "async_training.events=true") in said


def test_report_runs_as_a_module_without_the_stack(tmp_path: Path) -> None:
    """In an interpreter in which importing any part of it fails."""
    run_of(tmp_path).close()
    blocked = ("ray", "torch", "vllm", "verl", "transformers")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from recipe.report.__main__ import main; main()"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    "words",
    [
        ["--trace", "FILE", "--output", "FILE"],
        ["--follow", "--trace", "FILE"],
        ["--follow", "--output", "FILE"],
        ["--wait", "1"],
        ["--follow", "--wait", "nan"],
        ["--follow", "--wait", "-1"],
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, summary={"error": None}).close()
    file = tmp_path / "file"
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *(str(file) if word == "FILE" else word for word in words)])
    assert ended.value.code == 2 and not file.exists()
    assert words[-2].removeprefix("FILE") in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--output", "--trace"])
def test_file_that_cannot_be_written_is_named(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path).close()
    place = tmp_path / "no such folder" / "file"
    assert main([str(tmp_path), option, str(place)]) == 2
    assert str(place) in capsys.readouterr().err


def test_summary_that_was_cut_off_and_lines_of_garbage_are_left_out(tmp_path: Path) -> None:
    run_of(tmp_path, ago=100.0).close()
    (tmp_path / "summary.json").write_text('{"steps": 6, "acc')
    with open(tmp_path / "metrics.jsonl", "ab") as metrics:
        metrics.write(b'\xff\x00\n7\n{"training/global_step": 99')
    run = load(tmp_path)
    assert run.state == "was killed" and len(run.metrics) == STEPS


@pytest.mark.parametrize("summary", [{"error": None, "resumed": {"step": 10}}, None])
def test_seconds_a_step_of_a_resumed_run_are_of_its_own_steps(summary: dict[str, Any] | None, tmp_path: Path) -> None:
    """The record is of the newest start; the steps of earlier ones are in the folder too."""
    run_of(tmp_path, summary=summary).close()
    with open(tmp_path / "metrics.jsonl", "w") as metrics:
        for step in range(10 + STEPS):
            metrics.write(json.dumps({"training/global_step": step + 1}) + "\n")
    assert main([str(tmp_path), str(tmp_path)]) == 0
    text = (tmp_path / "compared.html").read_text()
    assert re.findall(r"<td>seconds a step</td><td[^>]*>([\d.]+)", text) == [f"{STEP_S:.3f}"]
    assert re.findall(r"</span> training</td><td[^>]*>([\d.]+)", text) == ["4.000"]


def test_run_that_has_no_device_yet_is_reported_and_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where both sides share their accelerators, before an engine was asked."""
    about = {"accelerators": {"trainer": 2, "rollout": 1}, "shared": True, "began": time.time()}
    file = EventFile(tmp_path, about)
    file.write([Event(TRAINER, Class.START_UP, 0.0, 3.0)])
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), str(tmp_path)]) == 0
    assert main([str(tmp_path), "--trace", str(tmp_path / "trace")]) == 0
    # The library's, of a chart that asks for data which is not there.
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_tokens_that_do_not_close_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, summary={"error": None, "account": {"duration": 24.0, "closes": False}}).close()
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("the account does not close")

# SPDX-License-Identifier: Apache-2.0
"""The record of a run is complete however the run ends, and goes on where a resumed run goes on."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from recipe.async_engine.record.run_record import METRICS_FILE, NON_FINITE, STEP, SUMMARY_FILE, RunRecord, exit_status

DOCUMENT = Path(__file__).parents[2] / "docs" / "run-record.md"
PROMISED = {
    "steps",
    "versions",
    "validation",
    "ledger",
    "staleness",
    "interrupted",
    "trainer_wait_share",
    "rollout_idle_share",
    "weight_sync_seconds",
    "wall_seconds",
    "peak_memory_gib",
}


class Scalar:
    """A number of numpy or torch."""

    ndim = 0

    def __init__(self, value: Any) -> None:
        self._value = value

    def item(self) -> Any:
        return self._value


class Array(Scalar):
    ndim = 1

    def item(self) -> Any:
        raise ValueError("can only convert an array of size 1")


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def summary_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SUMMARY_FILE).read_text())


def run_steps(folder: Path, first: int, last: int) -> RunRecord:
    record = RunRecord(folder, "fully_async")
    record.begin_at(first - 1)
    for step in range(first, last + 1):
        record.step({STEP: step, "actor/lr": step / 10})
    return record


def test_summary_has_every_promised_key_even_if_nothing_was_trained(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run", "fully_async")
    returned = record.close(None)
    summary = summary_in(tmp_path / "run")
    assert summary == returned
    assert summary.keys() >= PROMISED
    assert summary["validation"].keys() == {"first", "last"}
    assert summary["ledger"].keys() == {"issued", "trained", "filtered", "failed", "live"}
    assert summary["staleness"].keys() == {"bound", "max", "mean"}
    assert summary["error"] is None
    assert lines_in(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("alarms", "error", "ended", "status"),
    [
        ({}, None, "well", 0),
        ({"zero_gradients": {}}, None, "with_alarms", 3),
        ({"zero_gradients": {}}, "X", "failed", 0),
    ],
)
def test_summary_and_exit_status_say_how_a_run_ended(
    tmp_path: Path, alarms: dict[str, Any], error: str | None, ended: str, status: int
) -> None:
    record = RunRecord(tmp_path, "fully_async")
    record.update({"alarms": alarms})
    if error is not None:
        record.fail({"name": error, "message": "no replica is left"})
    record.close(None)
    assert summary_in(tmp_path)["ended"] == ended
    # One that failed exits by its error.
    assert exit_status(summary_in(tmp_path), says_alarms=True) == status
    assert exit_status(summary_in(tmp_path), says_alarms=False) == 0


def test_every_key_of_the_summary_is_documented(tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    for key, value in RunRecord(tmp_path, "fully_async").close(1.0).items():
        assert f"`{key}`" in text, key
        for inner in value if isinstance(value, dict) else ():
            assert f"`{inner}`" in text, inner


def test_each_step_is_one_line_with_its_numbers_and_the_time(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "fully_async")
    record.begin_at(0)
    record.step({STEP: 1, "a": Scalar(0.5), "b": True, "text": "no", "nan": float("nan"), "inf": Scalar(float("inf"))})
    record.step({STEP: Scalar(2), "many": Array(None), "none": None})
    first, second = lines_in(tmp_path)
    missing = {"nan": None, "inf": None, NON_FINITE: 2}
    assert {key: first[key] for key in first if key != "wall_seconds"} == {STEP: 1, "a": 0.5, "b": 1, **missing}
    assert {key: second[key] for key in second if key != "wall_seconds"} == {STEP: 2, NON_FINITE: 0}
    assert 0 <= first["wall_seconds"] <= second["wall_seconds"]


def test_time_of_the_first_step_is_kept(tmp_path: Path) -> None:
    record = run_steps(tmp_path, 1, 1)
    first = record.summary["first_step_seconds"]
    record.step({STEP: 2})
    assert record.close(None)["first_step_seconds"] == first >= 0


@pytest.mark.parametrize("error", [KeyError("reward"), {"name": "KeyError", "message": "'reward'", "traceback": "..."}])
def test_failed_run_names_its_error(tmp_path: Path, error: Any) -> None:
    record = run_steps(tmp_path, 1, 2)
    record.update({"steps": 2, "ledger": {"issued": 8, "trained": 4, "filtered": 0, "failed": 0, "live": 4}})
    record.fail(error)
    record.close(2.5)
    summary = summary_in(tmp_path)
    assert summary["error"] == {"name": "KeyError", "message": "'reward'"}
    assert (summary["steps"], summary["ledger"]["live"], summary["peak_memory_gib"]) == (2, 4, 2.5)
    assert [line[STEP] for line in lines_in(tmp_path)] == [1, 2]


def test_resumed_run_goes_on_after_the_last_step_of_its_checkpoint(tmp_path: Path) -> None:
    run_steps(tmp_path, 1, 5).close(None)
    run_steps(tmp_path, 4, 6).close(None)
    lines = lines_in(tmp_path)
    assert [line[STEP] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["actor/lr"] for line in lines] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def test_line_that_was_cut_off_by_a_kill_does_not_stop_the_resume(tmp_path: Path) -> None:
    run_steps(tmp_path, 1, 2)
    with open(tmp_path / METRICS_FILE, "a", encoding="utf-8") as file:
        file.write('{"wall_seconds": 3.1, "training/gl')
    run_steps(tmp_path, 3, 3)
    assert [line[STEP] for line in lines_in(tmp_path)] == [1, 2, 3]


def test_new_run_in_the_same_folder_starts_its_lines_afresh(tmp_path: Path) -> None:
    run_steps(tmp_path, 1, 3).close(None)
    run_steps(tmp_path, 1, 1)
    assert [line[STEP] for line in lines_in(tmp_path)] == [1]


def test_there_is_no_summary_while_a_run_goes_on(tmp_path: Path) -> None:
    run_steps(tmp_path, 1, 1).close(None)
    assert (tmp_path / SUMMARY_FILE).is_file()
    RunRecord(tmp_path, "fully_async")
    assert not (tmp_path / SUMMARY_FILE).exists()


def test_summary_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run_steps(tmp_path, 1, 1)
    seen: list[dict[str, Any]] = []

    def replace(source: Path, target: Path) -> None:
        assert not Path(target).exists()
        seen.append(json.loads(Path(source).read_text()))

    monkeypatch.setattr("recipe.async_engine.record.durable.os.replace", replace)
    record.close(None)
    assert seen == [record.summary]


def test_metrics_that_cannot_be_written_are_counted_and_leave_no_half_line(tmp_path: Path) -> None:
    record = run_steps(tmp_path, 1, 1)
    size = (tmp_path / METRICS_FILE).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for limit in (size + 10, size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            record.step({STEP: 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    record.step({STEP: 4})
    assert [line[STEP] for line in lines_in(tmp_path)] == [1, 4]
    assert record.close(None)["metrics_lost"] == 2


@pytest.mark.parametrize("torn", [b"\xff\xfe\x00", b"[]", b"{}", b'{"training/global_step": null}', b"12"])
def test_line_of_any_content_does_not_stop_the_resume(tmp_path: Path, torn: bytes) -> None:
    run_steps(tmp_path, 1, 2).close(None)
    with open(tmp_path / METRICS_FILE, "ab") as file:
        file.write(torn)
    record = run_steps(tmp_path, 3, 3)
    assert record.close(None)["metrics_lost"] == 0
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)[STEP] for line in (*lines[:2], lines[-1])] == [1, 2, 3]

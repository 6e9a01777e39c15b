# SPDX-License-Identifier: Apache-2.0
"""What is damaged, foreign or cut short on a disk is named with its file, left out or refused: never a traceback."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpointed import SCORED, snapshot
from checkpointed import plan as run_plan
from damages import bytes_of, damage_record, gone, json_of, part_of, tracker_of, write_run
from omegaconf import OmegaConf

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.rollout.kept_answers import TrajectoryRecord
from recipe.async_engine.trainer import checkpoints, rollout_state
from recipe.async_engine.trainer.checkpoints import MARKER, ROLLOUT_STATE, TRACKER, RunState
from recipe.async_engine.trainer.rollout_state import new_ledger
from recipe.plan.__main__ import main as plan
from recipe.report.__main__ import main as report

CALLS = ("plan", "trace", "follow", "plan", "trace") * 5 + ("report", "plan", "compare")
"""In turns; a page takes much longer to write than the rest to do."""


def call(what: str, folder: Path, sound: Path) -> int:
    if what == "plan":
        return plan([str(folder), "--accelerators", "3", "--seeds", "1", "--steps", "6"])
    if what == "follow":
        return report([str(folder), "--follow", "--wait", "0"])
    others = {"report": [], "trace": ["--trace", str(folder / "trace")], "compare": [str(sound)]}
    return report([str(folder), *others[what]])


def damaged(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    """What is done with damaged record ``number``, and its exit status."""
    draw, folder, sound = random.Random(number), tmp_path / f"run{number}", tmp_path / "sound"
    if not sound.exists():
        write_run(sound)
    write_run(folder)
    done = damage_record(folder, draw)
    what = CALLS[number % len(CALLS)]
    try:
        status = call(what, folder, sound)
    except BaseException as error:
        raise AssertionError(f"record {number}, {what}: {done}") from error
    out, err = capsys.readouterr()
    assert "Traceback" not in err, (number, done)
    if status:
        assert status in ((1, 2) if what == "follow" else (2,)), (number, status)
        assert str(folder) in out + err, (number, what, done, out, err)
    return what, status


def test_damaged_records_are_reported_on_planned_and_followed_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [damaged(number, tmp_path, capsys) for number in range(100)]
    # Most damage costs a part alone, and some the whole.
    assert 0 < sum(status != 0 for _, status in found) < 60, found


@pytest.mark.slow
def test_2_000_damaged_records_are_reported_on_planned_and_followed_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(100, 2100):
        damaged(number, tmp_path, capsys)


class Payloads:
    """Ray's object store, in which references are what they refer to."""

    def get(self, reference: Any, timeout: float) -> Any:
        return reference

    def put(self, value: Any) -> Any:
        return value


def state_in(root: Path) -> RunState:
    config = {"default_local_dir": str(root), "save_freq": 1, "resume_mode": "auto"}
    return RunState(OmegaConf.create({"trainer": config}), run_plan(), {"data.seed": 1, "tokenizer": "sha256 1"})


def two_checkpoints(root: Path) -> None:
    """Of steps 2 and 4, each with a group that is ready and one that runs, of which an answer is kept."""
    state = state_in(root)
    record = TrajectoryRecord(pickle.dumps([]), 0, 0)
    for step in (2, 4):
        live = [[0, 7, 0, "0-7", 1, "ready", 1, None], [1, 8, 0, "0-8", 1, "running", 1, None]]
        groups = {
            0: {"row": {"prompt": "a"}, "scored": [SCORED, SCORED], "payloads": [b"1", b"2"], "kept": [None, None]},
            1: {"row": {"prompt": "b"}, "scored": [SCORED, None], "payloads": [b"3", None], "kept": [None, record]},
        }
        more = {"unchanged_versions": step, "skipped_updates": {"actor": 0}, "validation": {"first": 0.5, "last": None}}

        def save_verl(step: int = step) -> None:
            (checkpoints.folder_of(root, step) / "data.pt").write_bytes(b"data")

        state.save(step, snapshot(live, groups, **more), save_verl)()


def damage_checkpoint(root: Path, draw: random.Random) -> str:
    """Damage the newer one; returns what was done."""
    folder = checkpoints.folder_of(root, 4)
    how = draw.randrange(8)
    if how == 0:
        tracker_of(root / TRACKER, draw)
    elif how == 1:
        draw.choice([bytes_of, gone])(folder / MARKER, draw)
    elif how == 2:
        json_of(folder / MARKER, draw)
    elif how == 3:
        draw.choice([bytes_of, gone])(folder / draw.choice([ROLLOUT_STATE, "data.pt"]), draw)
    else:
        content = part_of(torch.load(folder / ROLLOUT_STATE, weights_only=False), draw)
        if draw.random() < 0.3:
            content = part_of(content, draw)
        torch.save(content, folder / ROLLOUT_STATE)
        (folder / MARKER).unlink()
        checkpoints.commit(root, 4)
        return f"content: {content}"
    return f"{how}"


def found_of_damaged(number: int, whole: Path, root: Path) -> str:
    """What a start finds where checkpoint ``number`` is damaged."""
    draw = random.Random(number)
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(whole, root)
    done = damage_checkpoint(root, draw)
    state = state_in(root)
    try:
        folder = state.find()
    except RecipeError as error:
        # Another format, or other settings: nothing that an older one would mend.
        assert str(root) in str(error), (number, error)
        return "refused"
    except Exception as error:
        raise AssertionError(f"checkpoint {number}: {done}") from error
    assert folder is not None, (number, done)
    found = state.load(SimpleNamespace(restore=lambda position: None))
    assert found is not None
    new_ledger(run_plan(), found["ledger"]).check_identity()
    assert set(found["groups"]) == {row[0] for row in found["ledger"]["live"]}
    return folder[-1]


@pytest.fixture
def checkpointed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rollout_state, "ray", Payloads())
    two_checkpoints(tmp_path / "whole")
    return tmp_path / "whole"


def test_of_damaged_checkpoints_an_older_good_one_is_found_or_the_start_is_refused(
    checkpointed_run: Path, tmp_path: Path
) -> None:
    assert state_in(checkpointed_run).find() == str(checkpointed_run / "global_step_4")
    found = [found_of_damaged(number, checkpointed_run, tmp_path / "damaged") for number in range(100)]
    assert found.count("2") > 40 and found.count("refused") < 20, found


@pytest.mark.slow
def test_of_2_000_damaged_checkpoints_an_older_good_one_is_found_or_the_start_is_refused(
    checkpointed_run: Path, tmp_path: Path
) -> None:
    for number in range(100, 2100):
        found_of_damaged(number, checkpointed_run, tmp_path / "damaged")


@pytest.mark.parametrize(
    "marker",
    [
        '{"files": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"step": 4, "files": {"data.pt": [' + "9" * 5000 + ", null]}}",
        '{"step": 4, "files": {"data.pt": [NaN, null]}}',
        '{"step": 4, "files": {"../../data.pt": [4, null]}}',
        '{"step": 2, "files": {}}',
        '{"format": 2, "step": 4, "files": {}}',
    ],
)
def test_marker_of_another_kind_is_named_and_the_older_checkpoint_is_taken(
    marker: str, checkpointed_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpointed_run / "global_step_4" / MARKER).write_text(marker)
    assert state_in(checkpointed_run).find() == str(checkpointed_run / "global_step_2")
    assert "global_step_4 cannot be used" in caplog.text and f"s {MARKER} " in caplog.text


@pytest.mark.parametrize("content", ["{", "[]", "7", "\ufffe", "[" * 100_000])
def test_models_config_that_is_damaged_is_named_before_a_run_and_by_a_plan(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipe.async_engine.inspection.check import file_facts

    (tmp_path / "config.json").write_text(content)
    facts = file_facts({"actor_rollout_ref": {"model": {"path": str(tmp_path)}}})
    fault = next(fact.fault for fact in facts if fact.setting == "actor_rollout_ref.model.path")
    assert fault is not None and "config.json that" in fault
    assert plan([str(tmp_path), "--accelerators", "4", "--lengths", "10,1,20"]) == 2
    assert f"{tmp_path}/config.json is not a JSON object" in capsys.readouterr().err


def test_lines_of_a_killed_run_that_are_none_are_left_out_at_its_resume(tmp_path: Path) -> None:
    from recipe.async_engine.record.run_record import METRICS_FILE, RunRecord

    lines = [json.dumps({"training/global_step": step}) for step in (1, 2, 3)]
    odd = ["[" * 50_000, '{"training/global_step": ' + "9" * 400 + "}", '{"training/global_step": "x"}', "{"]
    (tmp_path / METRICS_FILE).write_text("\n".join([*lines, *odd]))
    record = RunRecord(tmp_path, "fully_async")
    record.begin_at(2)
    record.close(None)
    kept = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert kept[:2] == lines[:2] and lines[2] not in kept

# SPDX-License-Identifier: Apache-2.0
"""The advisor: the split that a closed form names, what it refuses, and what its command prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.plan.__main__ import main
from recipe.plan.advise import Goal, advise
from recipe.plan.device import MODELS
from recipe.plan.simulation import Scenario
from recipe.plan.times import Times


def test_the_best_split_balances_both_sides() -> None:
    # A replica makes 8 answers of 10 tokens in 10 s; a batch of 96 answers trains in 80 s / ranks.
    times = Times(
        groups=((10, 10),),
        step_s=lambda batch, context: 1.0,
        read_s=lambda tokens: 0.0,
        update_s=lambda lengths, ranks: 80.0 / ranks,
        log_probs_s=lambda lengths, ranks: 0.0,
    )
    base = Scenario(
        batch_groups=48, answers=2, replicas=1, slots=8, places=8, steps=16, at_swap="keep", keep_cache=True
    )
    # 16 devices: generation takes 120 s / replicas and training 80 s / ranks, equal at 6.4 ranks.
    found = advise(base, times, 16, Goal(), [0])
    assert found[0].scenario.trainer_ranks == 6
    assert found[0].scenario.max_staleness > 0
    bounded = advise(base, times, 16, Goal("staleness<=0"), [0])
    assert {advice.scenario.max_staleness for advice in bounded} >= {0}
    assert all(advice.staleness == 0 for advice in bounded)
    assert found[-1].why_worse(found[0]).startswith("wait_")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2.5-0.5b"]))
    return tmp_path


def test_an_estimate_is_marked_and_ends_with_a_line_to_paste(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(model), "--accelerators", "4", "--lengths", "100,0.5,400", "--batch", "8", "--steps", "6"]
    page = model / "split.html"
    assert main([*asked, "--seeds", "1", "--picture", str(page)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("An estimate")
    assert "async_training.max_staleness=" in said.splitlines()[-1]
    assert "max_staleness" in page.read_text()
    assert main([*asked, "--seeds", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["estimate"]
    assert answer["best"][0]["tokens_per_s"] >= answer["best"][-1]["tokens_per_s"]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (["--accelerators", "1", "--lengths", "9,1,99"], "--accelerators 1"),
        (["--accelerators", "8", "--goal", "fun", "--lengths", "9,1,99"], "--goal 'fun'"),
        (["--accelerators", "8", "--goal", "staleness<=x", "--lengths", "9,1,99"], "--goal"),
        (["--accelerators", "8", "--lengths", "long"], "--lengths 'long'"),
        (["--accelerators", "8", "--lengths", "9,1,99", "--device", "abacus"], "--device 'abacus'"),
        (["--accelerators", "8", "--lengths", "9,1,99", "--seeds", "0"], "--seeds 0"),
        (["--accelerators", "8"], "--lengths"),
    ],
)
def test_bad_input_is_refused_by_name(
    model: Path, capsys: pytest.CaptureFixture[str], asked: list[str], named: str
) -> None:
    assert main([str(model), *asked]) == 2
    assert named in capsys.readouterr().err


def test_a_folder_without_a_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--accelerators", "8"]) == 2
    assert "no record of events" in capsys.readouterr().err

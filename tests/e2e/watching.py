# SPDX-License-Identifier: Apache-2.0
"""Checks on how every run can be watched: in its trace, with `--follow`, and through Ray's exporter."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import FinishedRun
from trace_processor import loaded
from watched_trainer import SCRAPED

from recipe.async_engine.record.figures import EXPORTED, SHARE, TRAINER_SHARE
from recipe.report.__main__ import main

ANSWERS = "select count(*) as n from slice where category = 'trajectory' and name = 'generating'"
TRAINED = """
    select count(distinct flow.slice_out) as n from flow join slice on slice.id = slice_in where category = 'batch'
"""


def check_trace(run: FinishedRun, trained: int) -> None:
    """Check that the run's trace contains its account, and that each trained answer leads to a batch."""
    path = run.folder / "run.pftrace"
    assert main([str(run.folder), "--trace", str(path)]) == 0
    account = run.summary["account"]["seconds"]
    with loaded(path) as trace:
        found = trace.account()
        for device, classes in account.items():
            for name, seconds in classes.items():
                if name not in ("accelerators", "life"):
                    assert found.get((device, name), 0.0) == pytest.approx(seconds, abs=0.01), (device, name)
        (answers,), (led,) = trace.rows(ANSWERS), trace.rows(TRAINED)
        assert answers.n >= led.n == trained


def check_follow(run: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that `--follow` on a finished run prints its end and each side's figures."""
    capsys.readouterr()
    assert main([str(run.folder), "--follow"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"the run ended: steps {run.summary['steps']}")
    assert {"trainer", "rollout", "staleness"} <= {line.split()[1].rstrip(":") for line in said[:-1]}


def check_exported(run: FinishedRun) -> None:
    """Check that Prometheus got the figures of the last step, like the trackers."""
    last = run.metrics[-1]
    told: dict[tuple[str, str], float] = {}
    for line in Path(run.folder, SCRAPED).read_text().splitlines():
        if line.startswith("ray_recipe_"):
            name, _, labels = line.partition("{")
            told[name, labels.partition('phase="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
    for key in ("training/global_step", "fully_async/sampled_tokens", "timing_s/step", "fully_async/staleness/bound"):
        assert told[f"ray_{EXPORTED[key].name}", ""] == pytest.approx(last[key]), key
    assert told[f"ray_{TRAINER_SHARE.name}", "update"] == pytest.approx(last[f"{SHARE}update"], abs=0.2)
    assert {key for key in EXPORTED if key in last} <= {
        key for key in EXPORTED if (f"ray_{EXPORTED[key].name}", "") in told
    }

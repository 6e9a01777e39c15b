# SPDX-License-Identifier: Apache-2.0
"""Whatever a row of a user's data set is costs its own prompt; the tokenizer is the one that the run names."""

from __future__ import annotations

import shutil
from pathlib import Path

import odd_data
import pytest
from drilled_run import check_books
from main_runs import FULLY_ASYNC, run_main, small

from recipe.async_engine.task import TaskPaths

STEPS, GROUPS = 8, 4


@pytest.mark.e2e
@pytest.mark.slow
def test_whatever_a_row_is_costs_its_own_prompt(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(untrained_task.model, bare, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja", "special_*"))
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        f"actor_rollout_ref.model.path={bare}",
        f"actor_rollout_ref.model.tokenizer_path={untrained_task.model}",
        f"data.custom_cls.path={odd_data.__file__}",
        "data.custom_cls.name=OddRows",
        "data.shuffle=false",
        "data.filter_overlong_prompts=true",
        "trainer.save_freq=4",
        "trainer.test_freq=4",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    assert run.returncode == 0, run.output[-8000:]
    check_books(run, STEPS * GROUPS)
    prompts = run.rollout_state()["ledger"]["trained_prompts"]
    assert not [n for _, start, stop in prompts for n in range(start, stop) if odd_data.is_lost(n)]
    assert run.summary["ledger"]["failed"] >= STEPS * GROUPS // 2 - 1
    said = run.output + capfd.readouterr().err
    for words in ("TwoArguments: torn and lost", "SystemExit: 3", "cannot pickle '_thread.lock'", "no raw_prompt"):
        assert words in said, words
    assert run.summary["validation"]["last"] is not None

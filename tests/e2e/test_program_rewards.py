# SPDX-License-Identifier: Apache-2.0
"""An example script trains, with log-prob servers, on answers that are scored by running them in processes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest
from test_example_runs import SERVERS, run_example

from examples.program_task import write
from recipe.laptop.task import TaskPaths
from recipe.programs import reward as programs


def expect_little(path: Path) -> None:
    """Have every other row ask for a program that writes nothing, as each number is, and the others for a word."""
    table = pyarrow.parquet.read_table(path).to_pylist()
    for number, row in enumerate(table):
        expected = "word" if number % 2 else ""
        row["reward_model"]["ground_truth"] = json.dumps({"inputs": ["1", "2"], "outputs": [expected, expected]})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)


@pytest.mark.e2e
def test_programs_are_scored_in_processes_beside_generation(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    train, val = write(tmp_path / "data", train_size=64, val_size=8, seed=0)
    for path in (train, val):
        expect_little(path)
    folder = tmp_path / "run"
    folder.mkdir()
    overrides = [
        f"data.train_files={train}",
        f"data.val_files={val}",
        "data.max_prompt_length=256",
        "actor_rollout_ref.rollout.max_model_len=288",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        f"reward.custom_reward_function.path={programs.__file__}",
        "+reward.custom_reward_function.reward_kwargs={limits: {wall_s: 12, cpu_s: 2}, max_tests: 2, answer_s: 15}",
    ]
    run = run_example(SERVERS, "fully_async_servers", task, folder, ray_dir, *overrides)
    assert run.summary["ledger"]["failed"] == 0
    last = run.metrics[-1]
    assert last["fully_async/rewards/scored"] >= 16
    assert last["fully_async/rewards/timed_out"] == last["fully_async/rewards/died"] == 0
    assert last["fully_async/rewards/seconds"] > 0
    # The tiny model answers with digits: right where nothing is expected, wrong elsewhere.
    assert max(run.column("critic/score/max")) == 1.0
    assert min(run.column("critic/score/min")) == 0.0

# SPDX-License-Identifier: Apache-2.0
"""A run is started again with other settings, data or tokenizer: what can't go on says what was changed, all at once.

More, without processes: tests/core/test_snapshots.py.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from drilled_run import check_books, drilled
from main_runs import FULLY_ASYNC, run_main, small

from recipe.laptop.task import TaskPaths

GROUPS = 4
END_S = 90.0
REFUSED = {
    "actor_rollout_ref.rollout.n=8": "actor_rollout_ref.rollout.n = 8, but the checkpoint was made with 4",
    "data.max_prompt_length=40": "data.max_prompt_length = 40, but the checkpoint was made with 32",
    "data.max_response_length=16": "data.max_response_length = 16, but the checkpoint was made with 32",
    "trainer.n_gpus_per_node=2": "trainer.n_gpus_per_node = 2, but the checkpoint was made with 1",
    "data.seed=1": "data.seed = 1, but the checkpoint was made with 0",
}
NOTED = {
    "async_training.max_staleness=2": "async_training.max_staleness: ",
    "trainer.total_epochs=20": "trainer.total_epochs: ",
}


def other_rows(file: Path, folder: Path) -> Path:
    """A file with the same rows in another order."""
    table = parquet.read_table(file)
    parquet.write_table(table.take(list(range(len(table)))[::-1]), folder / file.name)
    return folder / file.name


def other_tokenizer(model: Path, folder: Path) -> Path:
    """The same model with two tokens exchanged."""
    shutil.copytree(model, folder / "model")
    tokenizer = folder / "model" / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(content))
    return folder / "model"


@pytest.mark.e2e
@pytest.mark.slow
def test_resume_with_changes_names_them_and_goes_on_only_where_that_is_sound(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    folder = tmp_path / "run"
    overrides = [*small(task, folder, ray_dir), "trainer.save_freq=1000", "trainer.total_training_steps=1000"]
    with drilled(FULLY_ASYNC, overrides, folder) as run:
        run.wait_for_steps(3)
        run.signal("main", signal.SIGTERM)
        first = run.end_within(END_S)
    # The next start removes the summary.
    stopped = first.summary
    assert stopped["stopped_by"] == "SIGTERM"
    assert stopped["ledger"]["live"] > 0

    data = f"data.train_files={other_rows(task.train, tmp_path)}"
    tokenizer = f"actor_rollout_ref.model.path={other_tokenizer(task.model, tmp_path)}"
    refused = run_main(FULLY_ASYNC, [*overrides, *REFUSED, data, tokenizer], folder)
    assert refused.returncode == 1
    error = refused.summary["error"]
    assert error["name"] == "SnapshotError"
    named = [*REFUSED.values(), "data.train_files = ", "tokenizer = "]
    assert not [text for text in named if text not in error["message"]], error["message"]

    steps = stopped["steps"] + 2
    last = run_main(FULLY_ASYNC, [*overrides, *NOTED, f"trainer.total_training_steps={steps}"], folder)
    assert last.returncode == 0
    assert last.summary["resumed"]["step"] == steps - 2
    noted = last.summary["resumed"]["changed"]
    assert len(noted) == len(NOTED)
    assert all(any(text in change for change in noted) for text in NOTED.values()), noted
    check_books(last, steps * GROUPS)

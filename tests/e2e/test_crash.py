# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""A run whose trainer is killed between two checkpoints: what was answered since the last one is found again."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path

import psutil
import pytest
from main_runs import FULLY_ASYNC, run_main, small

from recipe.async_engine.task import TaskPaths

STEPS, GROUPS = 6, 4
WAIT_S = 240.0


def groups_in_journal(folder: Path) -> int:
    """Groups that were completed after the newest checkpoint and before the next version."""
    try:
        connection = sqlite3.connect(f"file:{folder}/ledger_journal.sqlite?mode=ro", uri=True, timeout=5)
        rows = connection.execute("SELECT kind, answers IS NOT NULL FROM journal ORDER BY seq").fetchall()
        connection.close()
    except sqlite3.OperationalError:
        return 0
    kinds = [kind for kind, _ in rows]
    since = rows[len(kinds) - kinds[::-1].index("marked") :] if "marked" in kinds else []
    if any(kind == "published" for kind, _ in since):
        return 0
    return sum(kind == "ready" and bool(answers) for kind, answers in since)


def kill_trainer(folder: Path, killed: dict[str, int]) -> None:
    """SIGKILL the trainer's actor as soon as there is something to find again after a checkpoint."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = groups_in_journal(folder) if (folder / "global_step_2" / "committed.json").is_file() else 0
        if found:
            me = psutil.Process()
            actors = [child for child in me.children(recursive=True) if "TaskRunner" in " ".join(child.cmdline())]
            if actors:
                os.kill(actors[0].pid, signal.SIGKILL)
                killed["groups"] = found
                return
        time.sleep(0.005)


@pytest.mark.e2e
@pytest.mark.chaos
def test_killed_trainer_loses_no_answers_of_its_checkpoints_version(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    folder = tmp_path / "run"
    overrides = [
        *small(task, folder, ray_dir),
        "async_training.staleness_threshold=2",
        "trainer.save_freq=2",
        f"trainer.total_training_steps={STEPS}",
    ]
    killed: dict[str, int] = {}
    killer = threading.Thread(target=kill_trainer, args=(folder, killed))
    killer.start()
    first = run_main(FULLY_ASYNC, overrides, folder)
    killer.join()
    assert first.returncode == 1
    assert killed["groups"] >= 1
    checkpoint = first.rollout_state()["ledger"]
    connection = sqlite3.connect(folder / "ledger_journal.sqlite")
    rows = connection.execute("SELECT kind, row FROM journal ORDER BY seq").fetchall()
    connection.close()
    end = next((n for n, (kind, _) in enumerate(rows) if kind == "published"), len(rows))
    answered = {json.loads(row)[0] for kind, row in rows[:end] if kind == "ready"}

    second = run_main(FULLY_ASYNC, overrides, folder)
    assert second.returncode == 0, second.output[-8000:]
    assert second.summary["ledger"] == {
        "issued": STEPS * GROUPS,
        "trained": STEPS * GROUPS,
        "filtered": 0,
        "failed": 0,
        "live": 0,
    }
    assert second.summary["resumed"]["groups_kept"] == len(answered) >= killed["groups"]
    final = second.rollout_state()["ledger"]
    trained = [(epoch, n) for epoch, start, stop in final["trained_prompts"] for n in range(start, stop)]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS
    assert final["trained"] > checkpoint["trained"]

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
"""Drills: a process of a run is killed in a phase; the run goes on or ends, and a resumed one trains every prompt once.

One by one: ``pytest -m '' tests/e2e/test_drills.py -k "engine and sync"``.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from main_runs import FinishedRun, run_main, small

from recipe.async_engine.core.journal import MARK
from recipe.async_engine.task import TaskPaths

STEPS, MORE, GROUPS = 6, 2, 4
KILLED_AT = 4
PLACES = {
    "before batch": {(3, "batch taken")},
    "during batch": {(3, "batch taken")},
    "before sync": {(3, "batch trained")},
    # The new version is announced on the way.
    "during sync": {(3, "batch trained"), (4, "published")},
    "after sync": {(4, "published")},
    "during checkpoint": {(4, "saving")},
    "after checkpoint": {(4, "saved")},
}
"""Policy version and place that the ledger's journal has at a kill in the step `KILLED_AT`, every second one saved."""
FATAL = ("trainer", "training worker")
DRILLS = [
    ("trainer", "before batch"),
    ("trainer", "during batch"),
    ("trainer", "during sync"),
    ("trainer", "after sync"),
    ("trainer", "during checkpoint"),
    ("trainer", "after checkpoint"),
    ("training worker", "during batch"),
    ("training worker", "during sync"),
    ("rollout server", "before sync"),
    ("rollout server", "during sync"),
    ("rollout server", "during batch"),
    ("engine core", "during batch"),
    ("engine core", "during sync"),
    ("weight receiver", "during sync"),
    ("agent-loop worker", "during batch"),
    ("reward worker", "during batch"),
    ("log-prob server", "before sync"),
    ("log-prob worker", "during sync"),
    ("log-prob worker", "during batch"),
]


def place(journal: Path, run: FinishedRun) -> tuple[int | None, str]:
    """Where a run was when this was its ledger's journal: the policy version, and how far its step had come."""
    with closing(sqlite3.connect(journal)) as connection:
        rows = connection.execute("SELECT kind, version, reason FROM journal ORDER BY seq").fetchall()
    kinds = [kind for kind, _, _ in rows]
    version = max((version for _, version, _ in rows if version is not None), default=None)
    published = [n for n, kind in enumerate(kinds) if kind == "published"]
    since = kinds[published[-1] + 1 :] if published else kinds
    if "marked" in since and (published or kinds[0] != "marked"):
        return version, "saving"
    if "marked" in since:
        # A committed checkpoint drops what precedes its mark.
        checkpoint = run.rollout_state()["ledger"]
        assert checkpoint[MARK] == rows[0][2]
        return checkpoint["version"], "saved"
    if "trained" in since:
        return version, "batch trained"
    return version, "batch taken" if "taken" in since else "published"


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize(("part", "phase"), DRILLS, ids=[f"{part} {phase}" for part, phase in DRILLS])
def test_killed_process_costs_no_prompt(
    part: str, phase: str, task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = tmp_path / "run", tmp_path / "done.json"
    monkeypatch.setenv("DRILL_PART", part)
    monkeypatch.setenv("DRILL_PHASE", phase)
    monkeypatch.setenv("DRILL_STEP", str(KILLED_AT))
    monkeypatch.setenv("DRILL_DONE", str(done))

    def overrides(steps: int) -> list[str]:
        return [
            *small(task, folder, ray_dir),
            "rollout.n_gpus_per_node=2",
            "model_engine_server=fsdp2",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            "reward.num_workers=2",
            "async_training.staleness_threshold=2",
            "trainer.save_freq=2",
            f"trainer.total_training_steps={steps}",
        ]

    first = run_main("fully_async:drill_trainer.DrillTrainer", overrides(STEPS), folder)
    killed = json.loads(done.read_text())
    assert (killed["part"], killed["phase"], killed["step"]) == (part, phase, KILLED_AT)
    left = done.with_suffix(".sqlite")
    assert place(left if left.exists() else folder / "ledger_journal.sqlite", first) in PLACES[phase]
    assert first.returncode == (1 if part in FATAL else 0), first.output[-8000:]

    total = STEPS + MORE
    second = run_main("fully_async:drill_trainer.DrillTrainer", overrides(total), folder)
    assert second.returncode == 0, second.output[-8000:]
    count = total * GROUPS
    assert second.summary["ledger"] == {"issued": count, "trained": count, "filtered": 0, "failed": 0, "live": 0}
    trained = [
        (epoch, n)
        for epoch, start, stop in second.rollout_state()["ledger"]["trained_prompts"]
        for n in range(start, stop)
    ]
    assert len(trained) == len(set(trained)) == count

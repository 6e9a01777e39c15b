# SPDX-License-Identifier: Apache-2.0
"""Drills: a process of a run is killed in a phase; the run goes on or ends, and a resumed one trains every prompt once.

One by one: ``pytest -m '' tests/e2e/test_drills.py -k "engine and sync"``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from main_runs import run_main, small

from recipe.laptop.task import TaskPaths

STEPS, MORE, GROUPS = 6, 2, 4
KILLED_AT = 4
BEFORE = (KILLED_AT - 1) * GROUPS
"""Groups that were trained in the steps before the kill."""
PLACES = {
    "before batch": [(3, GROUPS, BEFORE, False)],
    "during batch": [(3, GROUPS, BEFORE, False)],
    "before sync": [(3, 0, BEFORE + GROUPS, False)],
    # The new version is announced on the way.
    "during sync": [(3, 0, BEFORE + GROUPS, False), (4, 0, BEFORE + GROUPS, False)],
    "after sync": [(4, 0, BEFORE + GROUPS, False)],
    "during checkpoint": [(4, 0, BEFORE + GROUPS, False)],
    "after checkpoint": [(4, 0, BEFORE + GROUPS, True)],
}
"""By phase: policy version, groups taken and trained, and whether the step's checkpoint was complete at the kill."""
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
    assert tuple(killed["place"].values()) in PLACES[phase]
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

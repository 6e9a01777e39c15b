# SPDX-License-Identifier: Apache-2.0
"""A run whose trainer lends its accelerators to hybrid replicas while it waits, beside one standalone replica."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, long_answers, run_main, small
from test_fully_async import check_books

from recipe.laptop.task import TaskPaths
from recipe.plan.__main__ import of_run
from recipe.plan.lending import LendingSimulation, simulated
from recipe.plan.times import fitted

LENDING = "fully_async/lending"


def elastic(task: TaskPaths, folder: Path, loops: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides for a run whose engines have too few places for its answers, which take two seconds."""
    return [
        *small(task, folder, ray_dir),
        *long_answers(loops, monkeypatch),
        "async_training.placement=elastic",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "async_training.concurrent_samples_per_replica=null",
    ]


@pytest.mark.e2e
def test_accelerators_are_lent_while_the_trainer_waits_and_no_token_is_lost(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 8
    overrides = [
        *elastic(untrained_task, tmp_path, tmp_path, ray_dir, monkeypatch),
        "async_training.trigger_parameter_sync_step=2",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=4",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_books(run, steps, bound=4)
    assert run.column(f"{LENDING}/switches")[-1] >= 2
    assert run.column(f"{LENDING}/lent_seconds")[-1] > 0
    seconds = run.summary["account"]["seconds"]
    assert set(seconds) == {"rollout 0", "rollout 1"}
    # Trainer and hybrid replica are one device.
    assert seconds["rollout 0"]["training"] > 0 and seconds["rollout 0"]["decoding"] > 0
    assert seconds["rollout 0"]["wait_switch"] > 0 and "wait_switch" not in seconds["rollout 1"]
    # Planning knows lending: the run is simulated from its own record.
    times, recorded = fitted(tmp_path)
    simulation = simulated(of_run(recorded, steps), times)
    result = simulation.run()
    assert result.trained_groups == run.summary["ledger"]["trained"] and result.staleness_max <= 4
    assert set(result.account.devices) == set(seconds)
    assert isinstance(simulation, LendingSimulation) and simulation.switches >= 2


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["wake", "lent", "sleep"])
@pytest.mark.parametrize("part", ["trainer", "hybrid", "standalone"])
def test_a_process_that_is_killed_around_a_switch_costs_no_prompt(
    part: str, phase: str, untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = tmp_path / "run", tmp_path / "done"
    # Only the first switch is certain where two standalone replicas generate.
    switch = "1" if part == "standalone" else "2"
    for name, value in {"PART": part, "PHASE": phase, "DONE": str(done), "SWITCH": switch}.items():
        monkeypatch.setenv(f"DRILL_{name}", value)
    steps = 8
    overrides = [
        *elastic(untrained_task, folder, tmp_path, ray_dir, monkeypatch),
        f"rollout.n_gpus_per_node={1 + (part == 'standalone')}",
        "async_training.partial_tokens_interval=0.05",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=2",
    ]
    first = run_main("fully_async:lending_drill.LendingDrill", overrides, folder)
    assert done.exists()
    # Weights that do not arrive end the run, because training ranks may wait for each other then.
    fatal = part == "trainer" or (part == "hybrid" and phase == "wake")
    assert first.returncode == fatal, first.output[-8000:]
    if fatal:
        first = run_main("fully_async:lending_drill.LendingDrill", overrides, folder)
    check_books(first, steps, bound=4)

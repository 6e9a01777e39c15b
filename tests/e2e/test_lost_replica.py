# SPDX-License-Identifier: Apache-2.0
"""One of two rollout replicas is killed while it generates, in each mode, or its engine fails.

`losing` has the trainers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, long_answers, run_main, small
from test_fully_async import check_books

from recipe.laptop.task import TaskPaths

STEPS = 12
APART = ["rollout.n_gpus_per_node=2", "async_training.max_staleness=1"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "settings", "bound"),
    [
        pytest.param("fully_async:losing.Losing", APART, 1, id="fully_async"),
        pytest.param("one_step_off:losing.Losing", APART[:1], 1, id="one_step_off"),
        pytest.param(
            "partial_rollout:losing.Losing",
            ["trainer.n_gpus_per_node=2", "async_training.max_staleness=2"],
            2,
            id="partial_rollout",
        ),
    ],
)
def test_answers_of_a_killed_replica_go_on_elsewhere_and_another_one_takes_its_place(
    main: str,
    settings: list[str],
    bound: int,
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOST", str(tmp_path / "lost.json"))
    overrides = [
        *small(task, tmp_path, ray_dir),
        *settings,
        *long_answers(tmp_path, monkeypatch),
        "async_training.partial_tokens_interval=0.05",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(main, overrides, tmp_path)
    # The same count of trained groups as without a loss, each within the bound and with a version for each token.
    check_books(run, STEPS, bound)
    live = run.column("fully_async/count/live_replicas")
    assert (live[0], live[-1]) == (2, 2)
    assert run.metrics[-1]["fully_async/count/restarts"] == 1
    # The first tokens of the lost answers were trained: they were sent to the other replica, which went on from them.
    recovered = run.metrics[-1]["fully_async/partial/recovered_tokens"]
    assert recovered > 0
    assert run.metrics[-1]["fully_async/partial/reprefilled_tokens"] > recovered
    assert json.loads((tmp_path / "lost.json").read_text())["asked_of_the_new_one"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_replica_whose_engine_raises_an_error_is_lost_at_once(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "raised"
    monkeypatch.setenv("ENGINE_RAISES", str(mark))
    overrides = [
        *small(task, tmp_path, ray_dir),
        *APART,
        *long_answers(tmp_path, monkeypatch, extension="recorded_requests.Raising"),
        "async_training.max_replica_restarts=0",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_books(run, STEPS, bound=1)
    assert mark.exists()
    assert run.column("fully_async/count/live_replicas")[-1] == 1

# SPDX-License-Identifier: Apache-2.0
"""A run's rehearsal with real processes: what works, and what is broken on purpose (`rehearsing`).

That a run goes on bit for bit as without one is shown by test_equivalence, whose runs rehearse.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from documented import for_accelerators
from main_runs import FULLY_ASYNC, FinishedRun, run_main, small
from test_example_runs import SCALED_DOWN

from recipe.laptop.task import TaskPaths

ROLLOUT = "actor_rollout_ref.rollout"
REHEARSE = "async_training.rehearsal=true"
IN_PLACE_OF = "async_training.weights.publish=inline"
STEPS = 2


def outcomes(run: FinishedRun) -> dict[str, str]:
    return {check["name"]: check["outcome"] for check in run.summary["rehearsal"]["checks"]}


def check_ended(run: FinishedRun, steps: int = STEPS) -> None:
    assert run.returncode == 0, run.output[-8000:]
    assert (run.summary["steps"], run.summary["error"]) == (steps, None)


@pytest.mark.e2e
@pytest.mark.slow
def test_two_ranks_work_while_weights_travel_and_a_circle_between_both_falls_back_to_inline(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    overrides = [
        *small(task, tmp_path, ray_dir),
        REHEARSE,
        "async_training.timeouts.rehearsal=4",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=3",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main("fully_async:rehearsing.Circular", overrides, tmp_path)
    check_ended(run)
    assert run.summary["rehearsal"]["fallbacks"] == [IN_PLACE_OF]
    assert outcomes(run)["weights arrive (publish=beside, staging=device)"] == "fell back"
    assert outcomes(run)["weights arrive (publish=inline, staging=device)"] == "passed"
    assert outcomes(run)["log-probs agree"] == "passed"
    assert f"the run goes on with {IN_PLACE_OF}" in run.output
    # As the run goes on, the trainer waits for its versions.
    assert all(step["timing_s/update_weights"] > 0.05 for step in run.metrics)


@pytest.mark.e2e
@pytest.mark.slow
def test_slow_receiver_falls_back_to_inline_and_the_run_goes_on(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    overrides = [
        *small(task, tmp_path, ray_dir),
        REHEARSE,
        "async_training.timeouts.rehearsal=4",
        f"{ROLLOUT}.checkpoint_engine.backend=slow_gloo",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module=rehearsing",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_ended(run)
    assert run.summary["rehearsal"]["fallbacks"] == [IN_PLACE_OF]


@pytest.mark.e2e
@pytest.mark.vllm("the defect is planted in a worker of vLLM")
@pytest.mark.slow
def test_engine_with_other_weights_ends_the_run_by_name(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_WEIGHTS", str(tmp_path / "other"))
    overrides = [
        *small(task, tmp_path, ray_dir),
        REHEARSE,
        "rollout.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=3",
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=rehearsing.OtherWeights",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    assert run.returncode == 1
    assert run.summary["error"]["name"] == "RehearsalFailed"
    assert run.summary["error"]["message"].startswith("log-probs agree: log-probs of replica ")
    assert run.summary["steps"] == 0
    assert outcomes(run)["log-probs agree"] == "failed"


@pytest.mark.e2e
@pytest.mark.vllm("the defect is planted in a worker of vLLM")
@pytest.mark.slow
def test_engine_that_does_not_wake_ends_the_run_by_name(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    overrides = [
        *small(task, tmp_path, ray_dir),
        REHEARSE,
        "async_training.timeouts.rehearsal=10",
        "async_training.timeouts.weight_sync=10",
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=rehearsing.NeverWakes",
    ]
    run = run_main("recipe.partial_rollout.main", overrides, tmp_path)
    assert run.returncode == 1
    assert run.summary["error"]["name"] == "RehearsalFailed"
    assert run.summary["error"]["message"].startswith("engines wake with the weights: ")
    assert outcomes(run)["engines stop and give their memory back"] == "passed"


@pytest.mark.e2e
@pytest.mark.slow
def test_rehearse_only_shows_a_table_and_leaves_an_earlier_run_alone(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    earlier = '{"account": null, "of": "an earlier run"}'
    (tmp_path / "summary.json").write_text(earlier)
    overrides = [*small(task, tmp_path, ray_dir), "rehearse_only=true"]
    run = run_main("recipe.partial_rollout.main", overrides, tmp_path)
    assert run.returncode == 0, run.output[-8000:]
    assert (tmp_path / "summary.json").read_text() == earlier
    own = FinishedRun(run.returncode, run.output, tmp_path / "rehearsal")
    assert own.summary["steps"] == 0
    assert own.summary["rehearsal"]["fallbacks"] == []
    assert set(outcomes(own).values()) <= {"passed", "left out"}
    assert "log-probs agree" in run.output


@pytest.mark.e2e
@pytest.mark.slow
def test_readme_command_for_accelerators_rehearses_when_it_is_scaled_down(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    command = for_accelerators()
    places = [f"{place}.n_gpus_per_node=1" for place in ("trainer", "rollout")]
    overrides = [*command.arguments, *SCALED_DOWN, *places, *small(task, tmp_path, ray_dir)[1:], "rehearse_only=true"]
    run = run_main(command.main, overrides, tmp_path)
    assert run.returncode == 0, run.output[-8000:]
    own = FinishedRun(run.returncode, run.output, tmp_path / "rehearsal")
    assert set(outcomes(own).values()) <= {"passed", "left out"}

# SPDX-License-Identifier: Apache-2.0
"""What cannot go on ends with a clear message and a non-zero exit, and what was finished before is kept.

More on refused configurations: tests/config/test_config.py and tests/integration/test_config_*.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tracker_files
from main_runs import FULLY_ASYNC, dying_receiver, run_main, small

from recipe.laptop.task import TaskPaths

RAISING_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    raise RuntimeError("the verifier has no license")
"""


REFUSED = {
    "actor_rollout_ref.rollout.n=0": "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.model.path=/no/such/model": "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.ppo_mini_batch_size=300": "ppo_mini_batch_size",
    "rollout.n_gpus_per_node=5": "rollout.n_gpus_per_node",
    "+async_training.pipeline_depth=5": "async_training.pipeline_depth",
    "+async_training.max_stalenes=1": "async_training.max_stalenes",
}


@pytest.mark.e2e
def test_everything_that_cannot_run_is_refused_at_once_before_any_process_starts(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    run = run_main(FULLY_ASYNC, [*small(task, tmp_path, ray_dir), *REFUSED], tmp_path, timeout_s=60)
    assert run.returncode == 1
    assert "ConfigError" in run.output
    assert "Traceback" not in run.output
    missing = [setting for setting in REFUSED.values() if setting not in run.output]
    assert not missing, run.output
    assert not list(ray_dir.iterdir())
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.e2e
@pytest.mark.slow
def test_reward_function_that_raises_ends_the_run_with_its_message(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(RAISING_REWARD)
    for name, value in tracker_files.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    logger = f"trainer.logger=[{','.join(tracker_files.NAMES)}]"
    overrides = [*small(task, tmp_path, ray_dir), logger, f"reward.custom_reward_function.path={reward}"]
    run = run_main(FULLY_ASYNC, [*overrides, "trainer.total_training_steps=4"], tmp_path)
    assert run.returncode == 1
    error = run.summary["error"]
    assert error["name"] == "RolloutFailed"
    assert "the verifier has no license" in error["message"]
    assert run.output.rstrip().splitlines()[-1].startswith("RunFailed: RolloutFailed:")
    assert run.summary["ended"] == "failed"
    told = tracker_files.all_of_one_run(tmp_path, None)
    for name, of_tracker in told.items():
        assert of_tracker.ended["run/ended"] == "failed", name
        assert "the verifier has no license" in of_tracker.ended["run/error"], name
    assert (told["wandb"].status, told["mlflow"].status) == (1, "FAILED")
    ledger = run.summary["ledger"]
    assert ledger["trained"] == 0
    assert ledger["failed"] >= 4
    assert ledger["issued"] == ledger["failed"] + ledger["live"]


@pytest.mark.e2e
@pytest.mark.slow
def test_only_replica_dying_in_a_sync_ends_the_run_and_the_resumed_run_trains_every_prompt_once(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, groups = 8, 4
    mark = tmp_path / "died"
    overrides = [
        *small(task, tmp_path / "run", ray_dir),
        *dying_receiver(monkeypatch, mark, version=4),
        "async_training.staleness_threshold=2",
        "async_training.max_staleness=2",
        "async_training.timeouts.weight_sync=15",
        "trainer.save_freq=1",
        f"trainer.total_training_steps={steps}",
    ]
    first = run_main(FULLY_ASYNC, overrides, tmp_path / "run")
    assert first.returncode == 1
    assert time.time() - mark.stat().st_mtime < 60
    assert first.summary["error"]["name"] == "NoReplicaLeft"
    assert "version 4" in first.summary["error"]["message"]
    saved = first.rollout_state()
    assert saved["ledger"]["version"] == 3
    # The pipeline was full: the checkpoint has groups that were generated, or on the way, and not trained.
    assert len(saved["groups"]) >= groups
    states = {row[5] for row in saved["ledger"]["live"]}
    assert states <= {"ready", "running"}

    second = run_main(FULLY_ASYNC, overrides, tmp_path / "run")
    assert second.returncode == 0, second.output[-8000:]
    assert second.summary["steps"] == steps
    assert second.summary["ledger"] == {
        "issued": steps * groups,
        "trained": steps * groups,
        "filtered": 0,
        "failed": 0,
        "live": 0,
    }
    assert second.summary["staleness"]["max"] <= 2
    assert second.column("training/global_step") == list(range(1, steps + 1))
    final = second.rollout_state()["ledger"]
    trained = {(epoch, index) for epoch, start, end in final["trained_prompts"] for index in range(start, end)}
    assert len(trained) == steps * groups
    assert final["trained_prompts"] == final["issued_prompts"]
    # What was alive at the checkpoint was trained after it, each prompt once, and nothing of what came before again.
    before = {(epoch, index) for epoch, start, end in saved["ledger"]["trained_prompts"] for index in range(start, end)}
    alive = {(row[2], row[1]) for row in saved["ledger"]["live"]}
    assert len(before) == saved["ledger"]["trained"]
    assert not before & alive
    assert before | alive <= trained

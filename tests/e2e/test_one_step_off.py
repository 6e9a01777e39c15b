# SPDX-License-Identifier: Apache-2.0
"""The one-step-off main: every batch exactly one version late, over a crash and a resume too; errors surface."""

from __future__ import annotations

from pathlib import Path

import pytest
from accounts import check_account
from main_runs import ONE_STEP_OFF, dying_receiver, run_main, small

from recipe.laptop.task import TaskPaths


@pytest.mark.e2e
def test_every_batch_is_one_version_late_also_after_a_crash_and_a_resume(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = ray_dir / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    steps, groups = 8, 4
    mark = tmp_path / "died"
    overrides = [
        *small(task, tmp_path / "run", ray_dir),
        "data.train_batch_size=4",
        # Two mini-batches a step, as in synchronous training.
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        *dying_receiver(monkeypatch, mark, version=5),
        "async_training.timeouts.weight_sync=15",
        # Fewer slots than a batch: its groups start one after the other, and still all at one version.
        "async_training.concurrent_samples_per_replica=3",
        "trainer.save_freq=2",
        f"trainer.total_training_steps={steps}",
    ]
    first = run_main(ONE_STEP_OFF, overrides, tmp_path / "run")
    assert first.returncode == 1
    assert mark.exists()
    assert first.summary["error"]["name"] == "NoReplicaLeft"
    saved = first.rollout_state()["ledger"]
    # The batch after the one that is trained next was issued already, or its prompts were taken.
    assert (saved["version"], saved["trained"]) == (4, 4 * groups)
    assert len(saved["live"]) >= groups
    assert {row[7] for row in saved["live"]} <= {4, 5}

    second = run_main(ONE_STEP_OFF, overrides, tmp_path / "run")
    assert second.returncode == 0, second.output[-8000:]
    summary = second.summary
    assert (summary["steps"], summary["versions"]) == (steps, steps)
    assert summary["ledger"] == {
        "issued": steps * groups,
        "trained": steps * groups,
        "filtered": 0,
        "failed": 0,
        "live": 0,
    }
    assert summary["staleness"]["bound"] == summary["staleness"]["max"] == 1
    assert summary["interrupted"] == 0
    assert second.column("training/global_step") == list(range(1, steps + 1))
    # Every token of every batch: neither fresher nor older.
    late = [0, *[1] * (steps - 1)]
    assert second.column("fully_async/staleness/oldest_token_max") == late
    assert second.column("fully_async/staleness/token_mean") == late
    trained = second.rollout_state()["ledger"]["trained_prompts"]
    assert sum(end - start for _, start, end in trained) == steps * groups
    # Of both runs nothing is left where temporary files are, but where vLLM's ranks met and by what verl locks folders.
    assert [file.name for file in temporary.iterdir() if not file.name.startswith(("vllm_dist_", "ckpt_"))] == []
    # A run that failed has its account too.
    assert first.summary["account"]["seconds"]["trainer"]["training"] > 0
    assert check_account(second)["tokens"]["restored"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_a_generation_error_ends_the_run_with_its_own_traceback(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILING_INDEX", "all")
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text("- name: user_loop\n  _target_: user_agent_loop.UserAgentLoop\n")
    overrides = [
        *small(task, tmp_path, ray_dir),
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=user_loop",
        "async_training.max_group_retries=0",
        "trainer.total_training_steps=4",
    ]
    run = run_main(ONE_STEP_OFF, overrides, tmp_path)
    assert run.returncode == 1
    assert run.summary["error"]["name"] == "RolloutFailed"
    assert "ValueError: this prompt has no answer" in run.summary["error"]["message"]
    # Where it happened, in the user's own file.
    assert "user_agent_loop.py" in run.output
    assert 'raise ValueError("this prompt has no answer")' in run.output

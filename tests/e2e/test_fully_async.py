# SPDX-License-Identifier: Apache-2.0
"""The fully-asynchronous main with real Ray, real vLLM, verl's real FSDP2 engine and real weight syncs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from accounts import check_account
from main_runs import FULLY_ASYNC, FinishedRun, decode_steps, dying_receiver, run_main, small
from watching import check_exported, check_follow, check_trace

from benchmarks.emulation.devices import Emulation, records
from recipe.laptop.task import TaskPaths
from recipe.report.__main__ import main as report

WATCHED = "fully_async:watched_trainer.WatchedTrainer"
DECOUPLED = "algorithm.rollout_correction.bypass_mode=false"
CHECKPOINT_ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
EMULATED_DEVICES = [
    "actor_rollout_ref.model.external_lib=benchmarks.emulation.trainer",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
    f"{CHECKPOINT_ENGINE}.backend=emulated_gloo",
    f"{CHECKPOINT_ENGINE}.custom_backend_module=benchmarks.emulation.transfer",
]


def check_books(run: FinishedRun, steps: int, bound: int, groups: int = 4) -> None:
    """What holds at the end of every run that succeeds: nothing lost, dropped, trained twice or past the bound."""
    assert run.returncode == 0, run.output[-8000:]
    summary = run.summary
    assert summary["error"] is None
    assert summary["steps"] == steps
    ledger = summary["ledger"]
    assert ledger["issued"] == ledger["trained"] + ledger["filtered"] + ledger["failed"] + ledger["live"]
    assert ledger["trained"] == steps * groups
    assert ledger["filtered"] == 0
    assert ledger["live"] == 0
    assert summary["staleness"]["bound"] == bound
    assert summary["staleness"]["max"] <= bound
    assert max(run.column("fully_async/staleness/oldest_token_max")) <= bound
    assert max(run.column("fully_async/partial/inexact_version_ratio")) == 0
    assert run.column("training/global_step") == list(range(1, steps + 1))
    assert all(step["actor/grad_norm"] > 0 for step in run.metrics if step["critic/advantages/max"] > 0)
    check_account(run)


@pytest.mark.e2e
@pytest.mark.slow
def test_bound_zero_is_on_policy_and_both_engines_agree_to_fp32(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    steps = 4
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        DECOUPLED,
        "async_training.staleness_threshold=0",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=2",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_books(run, steps, bound=0)
    assert run.summary["interrupted"] == 0
    assert run.column("fully_async/staleness/token_mean") == [0.0] * steps
    # Every batch is sampled and trained by the same weights: any difference is the weight sync's or the engines'.
    assert all(0 < difference < 1e-6 for difference in run.column("training/rollout_probs_diff_max"))
    assert 0 <= run.summary["validation"]["last"] <= 1


def check_devices(devices: Emulation, steps: int, versions: int) -> None:
    """Each piece of work of the run was a device's, and took as long."""
    assert devices.record is not None
    lines = [line for found in records(Path(devices.record)).values() for line in found]
    kinds = Counter(line["kind"] for line in lines)
    assert kinds["update"] == steps
    assert kinds["transfer"] == versions + 1
    # Of the trainer's own policy and of the reference policy.
    assert kinds["log_probs"] == 2 * steps
    assert kinds["step"] > steps
    times = devices.times(1)
    assert {line["device_s"] for line in lines if line["kind"] == "transfer"} == {times.transfer_s()}
    assert all(0 < line["sequences"] <= 64 for line in lines if line["kind"] == "step")
    assert all(0 < line["answer_tokens"] < line["tokens"] for line in lines if line["kind"] == "update")
    assert all(line["device_s"] > 0 and line["late_s"] >= 0 for line in lines)


@pytest.mark.e2e
def test_drained_syncs_with_a_user_defined_agent_loop_and_one_failing_prompt(
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Several batches a version, a fractional depth, KL to a reference policy; no answer is interrupted.

    All on emulated accelerators. It is watched in every way that there is: its report, its trace, `--follow`, and
    Prometheus.
    """
    steps = 6
    devices = Emulation(model="qwen2.5-0.5b", token_scale=2, record=str(tmp_path / "devices"))
    for name, value in {"FAILING_INDEX": "2", **devices.environment()}.items():
        monkeypatch.setenv(name, value)
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text("- name: user_loop\n  _target_: user_agent_loop.UserAgentLoop\n")
    overrides = [
        *small(task, tmp_path, ray_dir),
        DECOUPLED,
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=user_loop",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=user_manager.UserManager",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"trainer.rollout_data_dir={tmp_path / 'dumped'}",
        "async_training.partial_rollout=false",
        *EMULATED_DEVICES,
        "async_training.staleness_threshold=0.5",
        "async_training.max_staleness=1",
        "async_training.trigger_parameter_sync_step=2",
        "async_training.max_group_retries=1",
        "data.shuffle=false",
        f"trainer.total_training_steps={steps}",
        "+ray_kwargs.ray_init._system_config.metrics_report_interval_ms=500",
    ]
    run = run_main(WATCHED, overrides, tmp_path)
    check_books(run, steps, bound=1)
    check_exported(run)
    check_trace(run, trained=steps * 16)
    check_follow(run, capsys)
    assert run.summary["versions"] == steps // 2
    check_devices(devices, steps, versions=steps // 2)
    # By the worker of a manager of the user's, for each answer.
    dumped = [json.loads(line) for file in (tmp_path / "dumped").iterdir() for line in file.read_text().splitlines()]
    assert len(dumped) == steps * 16 and all(row["of_the_users_worker"] > 0 for row in dumped)
    # Tried twice, then counted and replaced; the run went on.
    assert run.summary["ledger"]["failed"] == 1
    assert run.summary["ledger"]["issued"] == steps * 4 + 1
    assert run.summary["interrupted"] == 0
    assert run.column("fully_async/partial/total_partial_num") == [0] * steps
    assert report(["--output", str(tmp_path / "report.html"), str(tmp_path)]) == 0
    assert f"The run ended after {steps} steps" in (tmp_path / "report.html").read_text()
    assert all("actor/kl_loss" in step for step in run.metrics)
    # The second batch of a version is behind the trainer's weights, but its proximal log-probs are the version's own.
    fresh = [step for step in run.metrics if step["fully_async/staleness/oldest_token_max"] == 0]
    assert fresh
    assert all(step["training/rollout_probs_diff_max"] < 1e-5 for step in fresh)


@pytest.mark.e2e
def test_bound_three_with_two_trainer_ranks_and_two_replicas_of_which_one_dies_in_a_sync(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long answers are interrupted at every sync and trained with the versions that really sampled them.

    The untrained model hardly ever ends an answer by itself, and few answers run at the same time, so generation is
    slower than training and some answers always run when a step is done.
    """
    steps = 8
    decode_steps(monkeypatch, 0.03)
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        "data.max_response_length=96",
        "async_training.concurrent_samples_per_replica=1",
        *dying_receiver(monkeypatch, tmp_path / "died", version=5),
        # The one that died stays lost, and each token takes a time of its own: on any machine some answers run when a
        # step is done.
        "async_training.max_replica_restarts=0",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
        "async_training.staleness_threshold=3",
        "async_training.max_staleness=3",
        "async_training.timeouts.weight_sync=20",
        "algorithm.rollout_correction.rollout_is=token",
        DECOUPLED,
        "trainer.n_gpus_per_node=2",
        "rollout.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=4",
        f"trainer.total_training_steps={steps}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    assert (tmp_path / "died").exists()
    check_books(run, steps, bound=3)
    assert run.summary["staleness"]["max"] >= 1
    assert run.summary["interrupted"] > 0
    assert sum(run.column("fully_async/partial/total_partial_num")) > 0
    assert max(run.column("fully_async/partial/max_partial_span")) >= 1
    # Replicas that hold the announced version: two until one died in the sync that made version 5.
    announced, live = run.column("fully_async/count/announced_version"), run.column("fully_async/count/live_replicas")
    assert {count for version, count in zip(announced, live, strict=True) if version < 4} == {2}
    assert {count for version, count in zip(announced, live, strict=True) if version > 4} == {1}
    assert all(step["rollout_corr/rollout_is_mean"] > 0 for step in run.metrics)

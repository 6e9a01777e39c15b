# SPDX-License-Identifier: Apache-2.0
"""What verl's trainers have beside GRPO, in the asynchronous modes: short runs on the built-in task."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
import tracker_files
from main_runs import FULLY_ASYNC, ONE_STEP_OFF, FinishedRun, run_main, small
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from recipe.laptop.task import TaskPaths

PARTIAL_ROLLOUT = "recipe.partial_rollout.main"
STEPS, GROUPS, ANSWERS = 3, 4, 4


def train(main: str, task: TaskPaths, folder: Path, ray_dir: Path, *overrides: str) -> FinishedRun:
    steps = f"trainer.total_training_steps={STEPS}"
    run = run_main(main, [*small(task, folder, ray_dir), steps, *overrides], folder)
    assert run.returncode == 0, run.output[-8000:]
    assert (run.summary["steps"], run.summary["ledger"]["trained"]) == (STEPS, STEPS * GROUPS)
    return run


def profiled(folder: Path) -> list[str]:
    """Profile the second step, of trainer and engine, on a CPU."""
    sections = [f"actor_rollout_ref.{part}.profiler" for part in ("actor", "ref", "rollout")]
    return [
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        f"global_profiler.save_path={folder / 'profiles'}",
        f"global_profiler.finish_hook_cmd='echo $VERL_PROFILE_SAVE_PATH >> {folder / 'hooks'}'",
        *(f"{section}.enable=true" for section in sections),
        *(f"{section}.tool_config.torch.contents=[cpu]" for section in sections),
        "actor_rollout_ref.rollout.profiler.tool_config.torch.discrete=true",
    ]


def check_profiles(folder: Path) -> None:
    traces = [str(file.relative_to(folder / "profiles")) for file in (folder / "profiles").rglob("*.json*")]
    assert any("rollout_replica_0" in trace for trace in traces), traces
    assert any("rollout_replica" not in trace for trace in traces), traces
    # Once of each kind of training worker: actor and reference policy.
    assert (folder / "hooks").read_text().splitlines() == [str(folder / "profiles")] * 2


@pytest.mark.e2e
@pytest.mark.slow
def test_rloo_with_kl_in_the_reward_balanced_batches_dumps_and_loggers(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, validation = tmp_path / "answers", tmp_path / "validation"
    for name, value in tracker_files.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOLD_OF_CHECKPOINTS", str(tmp_path / "told.jsonl"))
    # In an hour, which a checkpoint is said to take.
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + 3600))
    run = train(
        ONE_STEP_OFF,
        task,
        tmp_path / "run",
        ray_dir,
        "algorithm.adv_estimator=rloo",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.01",
        "trainer.balance_batch=true",
        f"trainer.rollout_data_dir={answers}",
        f"trainer.validation_data_dir={validation}",
        "trainer.test_freq=3",
        "data.train_max_samples=8",
        "trainer.total_epochs=2",
        "trainer.save_freq=100",
        "trainer.esi_redundant_time=3600",
        "trainer.checkpoint_callback_class=told_of_checkpoints.Told",
        *profiled(tmp_path),
        f"trainer.logger=[console,{','.join(tracker_files.NAMES)}]",
    )
    check_profiles(tmp_path)
    # In each step, none of which was due.
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    folders = [str(tmp_path / "run" / f"global_step_{step}") for step in (1, 2, 3)]
    assert told == [[step, folder, False, True] for step, folder in enumerate(folders, 1)]
    assert all(math.isfinite(step["actor/reward_kl_penalty"]) for step in run.metrics)
    assert any(step["actor/reward_kl_penalty"] != 0 for step in run.metrics)
    assert all("global_seqlen/balanced_max" in step for step in run.metrics)
    dumped = [json.loads(line) for file in answers.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(dumped) == STEPS * GROUPS * ANSWERS
    assert {"input", "output", "score"} <= dumped[0].keys()
    assert any(validation.glob("*.jsonl"))
    # Eight prompts are two batches; the third one begins the second epoch.
    inputs = {line["input"] for line in dumped}
    assert len(inputs) == 8
    norms = {step: metrics["actor/grad_norm"] for step, metrics in enumerate(run.metrics, 1)}
    told = tracker_files.all_of_one_run(tmp_path, "actor/grad_norm")
    assert told.keys() == set(tracker_files.NAMES)
    for name, of_tracker in told.items():
        assert of_tracker.column("actor/grad_norm") == pytest.approx(norms), name
        assert of_tracker.ended["run/ended"] == run.summary["ended"] != "failed", name
        assert float(of_tracker.ended["run/validation_last"]) == run.summary["validation"]["last"], name
    assert (told["wandb"].status, told["mlflow"].status) == (0, "FINISHED")
    assert any(key.startswith("val-core/") for key in told["wandb"].rows[STEPS]), (
        "the last validation is in the last row"
    )


@pytest.fixture
def reward_model(task: TaskPaths, tmp_path: Path) -> Path:
    """A model that gives a text one number, untrained."""
    config = AutoConfig.from_pretrained(task.model, num_labels=1)
    config.pad_token_id = 0
    torch.manual_seed(0)
    folder = tmp_path / "reward_model"
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.model).save_pretrained(folder)
    return folder


@pytest.mark.e2e
@pytest.mark.slow
def test_reward_model_on_resources_of_its_own(
    reward_model: Path, task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    answers = tmp_path / "answers"
    run = train(
        FULLY_ASYNC,
        task,
        tmp_path / "run",
        ray_dir,
        "builtin_task=null",
        "reward.custom_reward_function.path=null",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={reward_model}",
        f"trainer.rollout_data_dir={answers}",
    )
    assert any(step["actor/grad_norm"] > 0 for step in run.metrics)
    dumped = [json.loads(line) for file in answers.glob("*.jsonl") for line in file.read_text().splitlines()]
    # The model's own score of prompt and answer, by another implementation.
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    for line in dumped[:8]:
        asked = line["input"].removesuffix("<|assistant|>")
        tokens = tokenizer(f"{asked}<|end|><|assistant|>{line['output']}<|end|>", return_tensors="pt")
        assert line["score"] == pytest.approx(model(**tokens).logits.item(), abs=1e-5)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("main", [FULLY_ASYNC, ONE_STEP_OFF, PARTIAL_ROLLOUT])
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "gpg"])
def test_estimators_of_verl(main: str, estimator: str, task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    run = train(main, task, tmp_path, ray_dir, f"algorithm.adv_estimator={estimator}")
    assert any(step["actor/grad_norm"] > 0 for step in run.metrics)

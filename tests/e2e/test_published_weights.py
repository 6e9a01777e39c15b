# SPDX-License-Identifier: Apache-2.0
"""Several batches a version, answers without a log-prob server's scores in each, and a resume in the middle of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from main_runs import run_main, small
from test_fully_async import check_books
from test_model_engine import FP32, HF_CHECKPOINTS, Weights, batches, forward, largest_difference
from transformers import AutoModelForCausalLM

from recipe.laptop.task import TaskPaths

# vLLM's log-probs of its own tokens and Hugging Face's of the same weights.
ENGINES = 1e-4


def merged_by_verl_it_is_the_trainers(checkpoint: Path, target: Path) -> None:
    """verl's own merger makes a model of a checkpoint's shards, in bfloat16, as users run it."""
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(checkpoint), "--target_dir", str(target)]
    merged = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert merged.returncode == 0, merged.stderr[-3000:]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).state_dict()
    shards = torch.load(checkpoint / "model_world_size_1_rank_0.pt", weights_only=False)
    assert shards.keys() <= model.keys()
    assert all(torch.equal(shard.to_local().bfloat16(), model[name]) for name, shard in shards.items())


class WeightsOfVersions(Weights):
    """Of a run with four batches a version."""

    def of(self, version: int) -> torch.nn.Module:
        return super().of(4 * version)


@pytest.mark.e2e
@pytest.mark.slow
def test_each_log_prob_is_the_named_versions_also_after_a_resume_within_a_version(
    untrained_task: TaskPaths, tmp_path: Path, recorded: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer in three loses its scores on the way, so that the trainer computes them in every batch."""
    stopped, steps = 6, 10
    monkeypatch.setenv("LOSE_SCORES", "3")
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        *HF_CHECKPOINTS,
        "model_engine_server=fsdp2",
        "async_training.trigger_parameter_sync_step=4",
        "async_training.staleness_threshold=1",
        "async_training.max_staleness=1",
        "actor_rollout_ref.actor.optim.lr=3e-3",
    ]
    trainer = "fully_async:recording.RecordingApart"
    first = run_main(trainer, [*overrides, f"trainer.total_training_steps={stopped}"], tmp_path)
    check_books(first, stopped, bound=1)
    assert (tmp_path / f"global_step_{stopped}" / "published" / "rank_0_of_1.pt").is_file()
    run = run_main(trainer, [*overrides, f"trainer.total_training_steps={steps}"], tmp_path)
    check_books(run, steps, bound=1)
    assert run.summary["resumed"]["step"] == stopped
    assert all(rows > 0 for rows in run.column("model_engine_server/fallback_rows"))
    weights = WeightsOfVersions(untrained_task, tmp_path)
    sampled_after = 0
    for step, batch in enumerate(batches(recorded), start=1):
        assert batch["version"] == (step - 1) // 4
        assert largest_difference(batch, weights) <= FP32, step
        for row in range(len(batch["responses"])):
            for version in set(batch["token_versions"][row].tolist()) - {-1}:
                own = batch["token_versions"][row] == version
                sampled, _ = forward(weights.of(version), batch, row)
                assert (batch["rollout_log_probs"][row] - sampled)[own].abs().max() <= ENGINES, step
                sampled_after += step > stopped and version == 1
    assert sampled_after, "some were sampled by the version in whose middle the run resumed"
    merged_by_verl_it_is_the_trainers(tmp_path / f"global_step_{steps}" / "actor", tmp_path / "merged")
    # The versions differ by far more than what is allowed here.
    old, new = (forward(weights.of(version), batch, 0)[0] for version in (0, 1))
    assert (old - new).abs().max() > 100 * ENGINES

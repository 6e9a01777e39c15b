# SPDX-License-Identifier: Apache-2.0
"""Runs with log-prob servers: what they computed, against Hugging Face's forward with the weights that they name.

The metric ``timing_s/old_log_prob`` is the trainer's own log-prob work: 0 in every step that the servers served whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from main_runs import FULLY_ASYNC, FinishedRun, decode_steps, run_main, small
from test_fully_async import check_books
from transformers import AutoModelForCausalLM

from recipe.laptop.task import TaskPaths

FP32 = 1e-5
HF_CHECKPOINTS = [
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
]


def batches(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.pt"), key=lambda file: int(file.stem)):
        yield torch.load(file)


def forward(model: torch.nn.Module, batch: dict[str, Any], row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of a row's response, as long as its padded response."""
    width = batch["responses"].shape[1]
    there = batch["attention_mask"][row].bool()
    tokens, answer = batch["input_ids"][row][there], int(there[-width:].sum())
    with torch.no_grad():
        log_softmax = torch.log_softmax(model(tokens[None]).logits[0, :-1].float(), -1)
    log_probs = log_softmax.gather(-1, tokens[1:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    padding = (0, width - answer)
    return tuple(torch.nn.functional.pad(column[-answer:], padding) for column in (log_probs, entropy))


class Weights:
    """The policy of each version of a run with one batch a version, from its checkpoints."""

    def __init__(self, task: TaskPaths, folder: Path) -> None:
        self._task, self._folder = task, folder
        self._models: dict[int, torch.nn.Module] = {}

    def of(self, version: int) -> torch.nn.Module:
        if version not in self._models:
            saved = self._folder / f"global_step_{version}" / "actor" / "huggingface"
            path = self._task.model if version == 0 else saved
            self._models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return self._models[version]


def largest_difference(batch: dict[str, Any], weights: Weights) -> float:
    """Of log-probs and entropies from a direct computation, each token's by the version that is said to be its own."""
    largest = 0.0
    for row in range(len(batch["responses"])):
        scored_by = batch["old_log_prob_versions"][row]
        for version in set(scored_by.tolist()) - {-1}:
            log_probs, entropy = forward(weights.of(version), batch, row)
            own = scored_by == version
            for column, expected in (("old_log_probs", log_probs), ("entropy", entropy)):
                largest = max(largest, (batch[column][row] - expected)[own].abs().max().item())
    return largest


def check_served(run: FinishedRun, steps: int) -> None:
    """Everything was scored by the servers, in time and once."""
    assert run.column("timing_s/old_log_prob") == [0.0] * steps
    assert run.column("model_engine_server/fallback_rows") == [0] * steps
    assert all(step["actor/entropy"] > 0 for step in run.metrics)


@pytest.mark.e2e
def test_two_servers_score_each_token_by_the_version_that_sampled_it(
    untrained_task: TaskPaths, tmp_path: Path, recorded: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are interrupted by weight syncs and go on: their tokens have several versions.

    A batch takes longer to generate than to train, whatever the machine: decode steps of 0.05 s, two groups at once.
    """
    steps = 3
    decode_steps(monkeypatch, 0.05)
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        *HF_CHECKPOINTS,
        "model_engine_server=fsdp2",
        "model_engine_server.n_gpus_per_node=2",
        "model_engine_server.replicas=2",
        "data.max_response_length=64",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
        "async_training.concurrent_samples_per_replica=1",
        "async_training.staleness_threshold=2",
        "async_training.max_staleness=2",
        f"trainer.total_training_steps={steps}",
    ]
    run = run_main("fully_async:recording.RecordingApart", overrides, tmp_path)
    check_books(run, steps, bound=2)
    check_served(run, steps)
    assert run.summary["interrupted"] > 0
    assert sum(run.column("fully_async/partial/total_partial_num")) > 0
    last = run.metrics[-1]
    assert last["model_engine_server/answered_tokens"] == sum(run.column("fully_async/sampled_tokens"))
    assert last["model_engine_server/servers"] == 2
    assert last["model_engine_server/load_imbalance"] <= 0.2
    assert last["model_engine_server/late_sequences"] == 0
    # The planted slowness of decoding is what the trainer waits for most, and each server has an account.
    seconds = run.summary["account"]["seconds"]
    waits = {what: value for what, value in seconds["trainer"].items() if what.startswith("wait_")}
    assert max(waits, key=lambda what: waits[what]) == "wait_batch", waits
    assert seconds["log-probs 0"]["log_probs"] > 0 and seconds["log-probs 1"]["log_probs"] > 0
    weights = Weights(untrained_task, tmp_path)
    spans = 0
    for batch in batches(recorded):
        assert torch.equal(batch["old_log_prob_versions"], batch["token_versions"])
        assert largest_difference(batch, weights) <= FP32
        spans += sum(len(set(row.tolist()) - {-1}) > 1 for row in batch["token_versions"])
    assert spans > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_newest_version_for_every_batch_of_it_equals_what_the_trainer_recomputes(
    untrained_task: TaskPaths, tmp_path: Path, recorded: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 8
    monkeypatch.setenv("RECOMPUTE_TOO", "1")
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        "model_engine_server=fsdp2",
        "model_engine_server.anchor=latest",
        "model_engine_server.reference_replicas=1",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "async_training.staleness_threshold=1",
        "async_training.max_staleness=1",
        "async_training.trigger_parameter_sync_step=2",
        f"trainer.total_training_steps={steps}",
    ]
    run = run_main("fully_async:recording.RecordingApart", overrides, tmp_path)
    check_books(run, steps, bound=1)
    check_served(run, steps)
    # The reference policy's, by a server of its own, which keeps the initial weights.
    assert run.column("model_engine_server/reference_fallback_rows") == [0] * steps
    assert not any("timing_s/ref" in step for step in run.metrics)
    initial = Weights(untrained_task, tmp_path).of(0)
    stale = 0
    for step, batch in enumerate(batches(recorded), start=1):
        assert batch["version"] == (step - 1) // 2
        sampled = batch["token_versions"] >= 0
        assert (batch["old_log_prob_versions"][sampled] == batch["version"]).all()
        for column, again in (("old_log_probs", "recomputed_log_probs"), ("entropy", "recomputed_entropy")):
            assert (batch[column] - batch[again])[sampled].abs().max() <= FP32
        for row in range(len(batch["responses"])):
            expected, _ = forward(initial, batch, row)
            assert (batch["ref_log_prob"][row] - expected)[sampled[row]].abs().max() <= FP32
        stale += int((batch["token_versions"][sampled] < batch["version"]).sum())
    # Some were scored again after a publication, while they waited.
    assert stale > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_one_of_two_servers_dies_then_the_other_and_no_sample_is_lost(
    untrained_task: TaskPaths, tmp_path: Path, recorded: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-step-off; without any server the trainer computes the log-probs, as without servers at all."""
    steps, first, second = 9, 3, 6
    monkeypatch.setenv("KILL_SERVERS", f"{first}:0 {second}:1")
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        *HF_CHECKPOINTS,
        "model_engine_server=fsdp2",
        "model_engine_server.n_gpus_per_node=2",
        "model_engine_server.replicas=2",
        "async_training.max_replica_restarts=0",
        f"trainer.total_training_steps={steps}",
    ]
    run = run_main("one_step_off:recording.RecordingApart", overrides, tmp_path)
    check_books(run, steps, bound=1)
    # The batch under way when the last server died had been scored before.
    fallback = run.column("model_engine_server/fallback_rows")
    assert fallback[:second] == [0] * second
    assert fallback[-1] == len(next(batches(recorded))["responses"])
    own_work = run.column("timing_s/old_log_prob")
    assert own_work[:second] == [0.0] * second
    assert own_work[-1] > 0
    assert run.column("model_engine_server/servers")[-1] == 0
    weights = Weights(untrained_task, tmp_path)
    for batch in batches(recorded):
        assert largest_difference(batch, weights) <= FP32


MISMATCH = ("kl", "k3_kl", "log_ppl_diff", "rollout_is_mean", "rollout_is_max", "rollout_is_eff_sample_size")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("source", ["bypass", "loglinear"])
def test_sources_without_a_forward_pass_report_the_same_mismatch(
    source: str, untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """With answers that are a version old: the current policy differs from the one that sampled."""
    steps = 5
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        f"async_training.proximal_log_probs={source}",
        "algorithm.rollout_correction.rollout_is=token",
        "async_training.staleness_threshold=1",
        "async_training.max_staleness=1",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        f"trainer.total_training_steps={steps}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path)
    check_books(run, steps, bound=1)
    assert run.column("timing_s/old_log_prob") == [0.0] * steps
    assert all(f"rollout_corr/{name}" in step for name in MISMATCH for step in run.metrics)
    stale = [step for step in run.metrics if step["fully_async/staleness/token_mean"] > 0]
    assert stale
    assert all(step["rollout_corr/rollout_is_max"] > 1 for step in stale)
    assert all(0 < step["rollout_corr/rollout_is_eff_sample_size"] <= 1.001 for step in run.metrics)

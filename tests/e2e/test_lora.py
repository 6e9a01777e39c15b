# SPDX-License-Identifier: Apache-2.0
"""LoRA in real runs: what the rollout samples with is the adapter of the version that it names, as PEFT computes it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from main_runs import FinishedRun, long_answers, run_main, small
from peft import LoraConfig, PeftModel, get_peft_model
from test_fully_async import check_books
from test_model_engine import forward
from transformers import AutoModelForCausalLM

from recipe.laptop.task import TaskPaths

RANK, ALPHA = 6, 24
CLOSE = 2e-5
MERGED = ["actor_rollout_ref.model.lora.merge=true"]
ALONE = ["actor_rollout_ref.model.lora.merge=false", "actor_rollout_ref.rollout.load_format=auto"]


class Adapters:
    """The policy of each version: the base model's files, and the adapter that the trainer had."""

    def __init__(self, task: TaskPaths, folder: Path) -> None:
        self._task, self._folder = task, folder
        self._models: dict[int, PeftModel] = {}

    def of(self, version: int) -> PeftModel:
        if version not in self._models:
            base = AutoModelForCausalLM.from_pretrained(self._task.model, dtype=torch.float32)
            model = get_peft_model(
                base, LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
            )
            saved = self.saved(f"version_{version}")
            strange = model.load_state_dict(saved["adapter"], strict=False).unexpected_keys
            assert not strange
            assert saved["adapter"].keys() == {name for name in model.state_dict() if ".lora_" in name}
            self._models[version] = model.eval()
        return self._models[version]

    def saved(self, name: str) -> dict[str, Any]:
        return torch.load(self._folder / f"{name}.pt")

    def base(self, batch: dict[str, Any], row: int) -> torch.Tensor:
        """Log-probs of a row by the model without its adapter."""
        model = self.of(0)
        with model.disable_adapter():
            return forward(model, batch, row)[0]


def lora(task: TaskPaths, folder: Path, ray_dir: Path, steps: int) -> list[str]:
    return [
        *small(task, folder, ray_dir),
        f"actor_rollout_ref.model.lora_rank={RANK}",
        f"actor_rollout_ref.model.lora_alpha={ALPHA}",
        "actor_rollout_ref.model.target_modules=all-linear",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        f"trainer.total_training_steps={steps}",
    ]


def check_rollout(run: FinishedRun, adapters: Adapters, folder: Path, steps: int) -> set[int]:
    """Each token's log-prob is that of PEFT's forward by its version; returns the versions that sampled some."""
    sampled: set[int] = set()
    for step in range(1, steps + 1):
        batch = torch.load(folder / f"batch_{step}.pt")
        for row in range(len(batch["responses"])):
            for version in set(batch["token_versions"][row].tolist()) - {-1}:
                own = batch["token_versions"][row] == version
                expected, _ = forward(adapters.of(version), batch, row)
                assert (batch["rollout_log_probs"][row] - expected)[own].abs().max() <= CLOSE, (step, row, version)
                sampled.add(version)
    assert not any(step.get("fully_async/weight_sync/unchanged") for step in run.metrics)
    assert run.summary["unchanged_versions"] == 0
    return sampled


def check_versions_differ(adapters: Adapters, folder: Path, versions: int) -> None:
    """By far more than what is allowed here, each from the one before."""
    batch = torch.load(folder / "batch_1.pt")
    forwards = [forward(adapters.of(version), batch, 0)[0] for version in range(versions)]
    for before, after in pairwise(forwards):
        assert (before - after).abs().max() > 50 * CLOSE


def check_untouched(adapters: Adapters, versions: int) -> None:
    """Bit for bit, training has after each publication what it had before, and the base weights of the files."""
    first = adapters.saved("version_0")["base"]
    for version in range(1, versions + 1):
        before, after = adapters.saved(f"version_{version}"), adapters.saved(f"after_{version}")
        for part in ("adapter", "base"):
            assert all(torch.equal(tensor, after[part][name]) for name, tensor in before[part].items())
        assert all(torch.equal(tensor, after["base"][name]) for name, tensor in first.items())


NOT_SGLANG = pytest.mark.vllm("adapters alone are refused with SGLang")
FULLY_ASYNC, IN_TURNS = "fully_async:lora_trainer.Apart", "partial_rollout:lora_trainer.InTurns"
ONE_STEP_OFF = "one_step_off:lora_trainer.Apart"
# So that each batch is of one version, whatever takes how long.
BOUND_0 = ["async_training.staleness_threshold=0"]
RUNS = [
    pytest.param(FULLY_ASYNC, [*MERGED, *BOUND_0], id="fully_async-merged", marks=pytest.mark.slow),
    pytest.param(IN_TURNS, [*ALONE, *BOUND_0], id="partial_rollout-alone", marks=NOT_SGLANG),
    pytest.param(ONE_STEP_OFF, ALONE, id="one_step_off-alone", marks=[NOT_SGLANG, pytest.mark.slow]),
    pytest.param(FULLY_ASYNC, [*ALONE, *BOUND_0], id="fully_async-alone", marks=[NOT_SGLANG, pytest.mark.slow]),
    pytest.param(ONE_STEP_OFF, MERGED, id="one_step_off-merged", marks=pytest.mark.slow),
    pytest.param(IN_TURNS, [*MERGED, *BOUND_0], id="partial_rollout-merged", marks=pytest.mark.slow),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("trainer", "how"), RUNS)
def test_the_rollout_samples_with_the_adapter_of_each_version_in_each_mode(
    trainer: str,
    how: list[str],
    untrained_task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    recorded: Path,
) -> None:
    """The reference policy of the KL term is the actor without its adapter."""
    steps = 4
    overrides = [*lora(untrained_task, tmp_path, ray_dir, steps), *how, "actor_rollout_ref.actor.use_kl_loss=true"]
    run = run_main(trainer, overrides, tmp_path)
    late = int(trainer == ONE_STEP_OFF)
    check_books(run, steps, bound=late)
    adapters = Adapters(untrained_task, recorded)
    assert check_rollout(run, adapters, recorded, steps) == set(range(steps - late))
    check_versions_differ(adapters, recorded, steps)
    check_untouched(adapters, steps)
    for step in range(1, steps + 1):
        batch = torch.load(recorded / f"batch_{step}.pt")
        there = batch["token_versions"][0] >= 0
        assert (batch["ref_log_prob"][0] - adapters.base(batch, 0))[there].abs().max() <= CLOSE


ELASTIC = "async_training.placement=elastic"
SWAPS = [
    pytest.param([*ALONE, "async_training.weights.at_swap=interrupt"], id="alone-interrupt", marks=NOT_SGLANG),
    pytest.param([*MERGED, "async_training.weights.at_swap=keep"], id="merged-keep"),
    pytest.param([*ALONE, ELASTIC], id="alone-elastic"),
    pytest.param([*MERGED, ELASTIC], id="merged-elastic"),
]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("how", SWAPS)
def test_an_answer_goes_on_under_the_next_adapter_with_two_training_ranks_and_two_replicas(
    how: list[str],
    untrained_task: TaskPaths,
    tmp_path: Path,
    recorded: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = 4
    overrides = [
        *lora(untrained_task, tmp_path, ray_dir, steps),
        *how,
        *long_answers(tmp_path, monkeypatch),
        "trainer.n_gpus_per_node=2",
        "rollout.n_gpus_per_node=2",
        "async_training.staleness_threshold=2",
        "async_training.max_staleness=2",
        "async_training.concurrent_samples_per_replica=2",
    ]
    # Hybrid replicas are on the accelerators of training workers, which have a class of their own.
    run = run_main("fully_async:lora_trainer.InTurns" if ELASTIC in how else FULLY_ASYNC, overrides, tmp_path)
    check_books(run, steps, bound=2)
    adapters = Adapters(untrained_task, recorded)
    check_rollout(run, adapters, recorded, steps)
    check_untouched(adapters, steps)
    assert sum(run.column("fully_async/partial/total_partial_num")) > 0
    # The first two waits are lent, and hybrid replicas generate with the same adapter.
    assert ELASTIC not in how or run.column("fully_async/lending/switches")[-1] > 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param([*MERGED, "model_engine_server=fsdp2"], id="merged-log-prob-server"),
        pytest.param([*ALONE, "async_training.proximal_log_probs=recompute"], id="alone-recompute", marks=NOT_SGLANG),
    ],
)
def test_a_run_that_resumes_within_a_version_has_its_adapter_everywhere(
    how: list[str], untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path, recorded: Path
) -> None:
    """Versions of two batches; the proximal log-probs are of the versions that they name, or of the newest one."""
    stopped, steps = 3, 6
    overrides = [
        *lora(untrained_task, tmp_path, ray_dir, stopped),
        *how,
        "async_training.trigger_parameter_sync_step=2",
        "async_training.staleness_threshold=1",
        "async_training.max_staleness=1",
        "trainer.save_freq=1",
    ]
    check_books(run_main(FULLY_ASYNC, overrides, tmp_path), stopped, bound=1)
    run = run_main(FULLY_ASYNC, [*overrides, f"trainer.total_training_steps={steps}"], tmp_path)
    check_books(run, steps, bound=1)
    assert run.summary["resumed"]["step"] == stopped
    adapters = Adapters(untrained_task, recorded)
    check_rollout(run, adapters, recorded, steps)
    check_versions_differ(adapters, recorded, steps // 2)
    for step in range(1, steps + 1):
        batch = torch.load(recorded / f"batch_{step}.pt")
        assert batch["version"] == (step - 1) // 2
        for row in range(len(batch["responses"])):
            sampled = batch["token_versions"][row] >= 0
            newest = torch.where(sampled, batch["version"], -1)
            scored_by = batch["old_log_prob_versions"][row] if "old_log_prob_versions" in batch else newest
            for version in set(scored_by.tolist()) - {-1}:
                expected, _ = forward(adapters.of(version), batch, row)
                assert (batch["old_log_probs"][row] - expected)[scored_by == version].abs().max() <= CLOSE


FROZEN = [
    pytest.param("fully_async:lora_trainer.FrozenApart", id="fully_async"),
    pytest.param("one_step_off:lora_trainer.FrozenApart", id="one_step_off"),
    pytest.param("partial_rollout:lora_trainer.FrozenInTurns", id="partial_rollout"),
]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("trainer", FROZEN)
def test_a_rollout_that_gets_the_frozen_base_alone_ends_the_run(
    trainer: str, untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """The defect of verl #7495; the learning rate of the first step is not known, so its version is not judged."""
    overrides = [
        *lora(untrained_task, tmp_path, ray_dir, steps=9),
        *MERGED,
        "async_training.alarms.unchanged_weights=2",
    ]
    run = run_main(trainer, overrides, tmp_path)
    assert run.returncode != 0
    assert run.summary["error"]["name"] == "AlarmLimit"
    assert "async_training.alarms.unchanged_weights=2" in run.summary["error"]["message"]
    assert run.summary["unchanged_versions"] == 2
    key = "fully_async/weight_sync/unchanged"
    assert [step[key] for step in run.metrics if key in step][-3:] == [0, 1, 1]
    assert "alarm unchanged_weights, 2 versions" in run.output

# SPDX-License-Identifier: Apache-2.0
"""Stock verl mains, unchanged, on a machine without an accelerator: real vLLM, real FSDP2, real weight sync.

They show the CPU platform and the checkpoint engine `recipe_gloo` without any code of the asynchronous modes, and are
the baseline of side-by-side runs. Each run is one subprocess with a Ray of its own, one at a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import stock_overrides as stock
import torch
from main_process import last_words
from main_runs import FULLY_ASYNC, small, trainer_log
from main_runs import run_main as run_ours
from metric_names import row_of, rows
from safetensors.torch import load_file

from recipe.laptop.task import TaskPaths

pytestmark = pytest.mark.vllm("stock verl's weight sync to SGLang fails on a CPU")

CHECKOUT = Path(__file__).parents[2]
RUN_S = 600
STEPS = 4


def run_main(main: str, overrides: list[str], out_dir: Path) -> tuple[str, list[dict[str, float]]]:
    """Run a stock main to its end and return what it wrote and its metrics, one dictionary a step."""
    metrics = out_dir / "metrics.jsonl"
    environment = stock.stock_environment(CHECKOUT) | {"VERL_FILE_LOGGER_PATH": str(metrics)}
    finished = stock.forked_main(main, overrides, out_dir, environment, RUN_S)
    assert finished.returncode == 0, last_words(finished)
    steps = stock.read_metrics(metrics)
    # docs/metrics.md has a row for each.
    assert sorted(name for step in steps for name in step if row_of(name, rows()) is None) == []
    return finished.stdout, steps


@pytest.mark.e2e
@pytest.mark.slow
def test_stock_one_step_off_policy_main_trains_on_a_cpu(
    untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    overrides = stock.cpu_overrides(untrained_task, tmp_path, ray_dir, devices=2) + stock.one_step_overrides(STEPS)
    overrides.append(f"trainer.save_freq={STEPS}")
    _, steps = run_main(stock.ONE_STEP_MAIN, overrides, tmp_path)
    assert [step["training/global_step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    # Every step synchronised the weights, all of them, through this package's engine.
    parameter_bytes = {step["weight_sync/bytes"] for step in steps}
    assert len(parameter_bytes) == 1 and parameter_bytes.pop() > 100_000
    assert all(0 < step["weight_sync/seconds"] < 60 for step in steps)
    # The first batch is generated and trained by the same weights, so vLLM and FSDP2 must agree on its probabilities.
    assert steps[0]["training/rollout_probs_diff_max"] < 1e-7
    # Every later batch is one step late: the weights that trained it are not those that generated it.
    assert all(step["training/rollout_probs_diff_max"] > 1e-7 for step in steps[1:])
    begins_with_the_weights_of(tmp_path / "checkpoints" / f"global_step_{STEPS}", untrained_task, tmp_path, ray_dir)


def begins_with_the_weights_of(stock_folder: Path, task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    """A run of this package, whose learning rate is 0, has the weights of a stock checkpoint bit for bit."""
    folder = tmp_path / "ours"
    overrides = [*small(task, folder, ray_dir), "trainer.save_freq=1", "trainer.total_training_steps=1"]
    overrides += [f"async_training.start_from={stock_folder}", "actor_rollout_ref.actor.optim.lr=0"]
    run = run_ours(FULLY_ASYNC, overrides, folder)
    assert run.returncode == 0, run.output[-8000:]
    assert "optimizer, learning-rate schedule, position in the data" in trainer_log(overrides)
    assert (run.summary["resumed"]["step"], run.summary["steps"]) == (0, 1)
    stock_weights, ours = (
        torch.load(place / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
        for place in (stock_folder, folder / "global_step_1")
    )
    base = load_file(task.model / "model.safetensors")
    assert any(not torch.equal(stock_weights[name].to_local(), base[name]) for name in base)
    assert all(torch.equal(stock_weights[name].to_local(), ours[name].to_local()) for name in stock_weights)


@pytest.mark.e2e
@pytest.mark.slow
def test_stock_fully_async_main_trains_on_a_cpu(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    overrides = stock.cpu_overrides(task, tmp_path, ray_dir, devices=2) + stock.fully_async_overrides(STEPS)
    output, steps = run_main(stock.FULLY_ASYNC_MAIN, overrides, tmp_path)
    assert "Training failed" not in output
    # Stock logs a step's metrics with the version after it, so the last step's are not always written.
    trained = [step for step in steps if "actor/grad_norm" in step]
    assert len(trained) >= STEPS - 1
    assert all(step["actor/grad_norm"] > 0 for step in trained)
    versions = [step["fully_async/count/current_param_version"] for step in trained]
    assert versions == list(range(len(trained)))
    assert all(0 < step["timing_s/timing_s/param_sync"] < 60 for step in trained)

# SPDX-License-Identifier: Apache-2.0
"""A short run of each mode with the built-in task, on the given device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from main_runs import RUN_S, FinishedRun, run_main, small, trained_answers

from recipe.laptop.task import TaskPaths

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
STEPS, GROUPS, ANSWERS = 4, 4, 4
KILLED_AFTER = 2
# Tolerance for probabilities: fp32 on both sides, or bf16, which rounds logits to 2^-8.
CLOSE = {"cpu": 1e-5, "cuda": 0.05}


def on_accelerators(apart: bool) -> list[str]:
    """Return the differences from the CPU preset: bf16, captured graphs, sleep and wake, NCCL, real accelerators."""
    return [
        "trainer.device=cuda",
        "ray_kwargs.ray_init.num_gpus=null",
        f"{ROLLOUT}.dtype=bfloat16",
        f"{ROLLOUT}.enforce_eager=false",
        f"{ROLLOUT}.free_cache_engine=true",
        f"{ROLLOUT}.enable_sleep_mode=true",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls="
        "recipe.async_engine.engines.vllm.engine_extension.StagingExtension",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16",
        *(
            [
                f"{ROLLOUT}.checkpoint_engine.backend=nccl",
                f"{ROLLOUT}.checkpoint_engine.custom_backend_module=recipe.async_engine.weights.nccl_engine",
            ]
            if apart
            else []
        ),
    ]


def overrides(device: str, mode: str, task: TaskPaths, folder: Path, ray_dir: Path, steps: int = STEPS) -> list[str]:
    apart = mode != "partial_rollout"
    return [
        *small(task, folder, ray_dir),
        f"trainer.total_training_steps={steps}",
        # The trainer computes its own log-probs beside the rollout's in every mode.
        "algorithm.rollout_correction.bypass_mode=false",
        *(on_accelerators(apart) if device == "cuda" else []),
    ]


def run_on(device: str, main: str, arguments: list[str], folder: Path) -> FinishedRun:
    # Only on a CPU are workers forks of one process that has imported the stack, because CUDA does not survive a fork.
    return run_main(main, arguments, folder, timeout_s=RUN_S, shared=device == "cpu")


def check(run: FinishedRun, device: str, late: bool = False, steps: int = STEPS) -> dict[str, Any]:
    """Check that a run has trained and that rollout and trainer agree; return its figures.

    ``late``: the mode's batches are a version late by definition, so the two policies differ.
    """
    assert run.returncode == 0, run.output[-8000:]
    total = steps * GROUPS
    assert run.summary["steps"] == steps
    assert run.summary["ledger"] == {"issued": total, "trained": total, "filtered": 0, "failed": 0, "live": 0}
    on_policy = [step for step in run.metrics if step["fully_async/staleness/oldest_token_max"] == 0]
    differences = [step["training/rollout_probs_diff_max"] for step in on_policy]
    assert late or differences
    assert max(differences, default=0) < CLOSE[device]
    return {
        "largest_difference_of_probabilities": max(differences, default=None),
        "seconds_of_last_sync": run.metrics[-1].get("fully_async/weight_sync/seconds"),
        "seconds_a_step": run.metrics[-1].get("timing_s/step"),
    }


def run_apart(device: str, mode: str, task: TaskPaths, folder: Path, ray_dir: Path) -> dict[str, Any]:
    """Run `fully_async` or `one_step_off`, with trainer and rollout on separate accelerators."""
    run = run_on(device, f"recipe.{mode}.main", overrides(device, mode, task, folder, ray_dir), folder)
    return check(run, device, late=mode == "one_step_off")


def rehearse(device: str, mode: str, task: TaskPaths, folder: Path, ray_dir: Path) -> dict[str, Any]:
    """Run the rehearsal of a mode, check that it passes, and return the seconds of each of its checks."""
    arguments = [*overrides(device, mode, task, folder, ray_dir), "rehearse_only=true"]
    run = run_on(device, f"recipe.{mode}.main", arguments, folder)
    assert run.returncode == 0, run.output[-8000:]
    rehearsal = FinishedRun(run.returncode, run.output, folder / "rehearsal").summary["rehearsal"]
    assert rehearsal["fallbacks"] == []
    # In one_step_off a swap waits for requests, so none is interrupted.
    assert {check["outcome"] for check in rehearsal["checks"]} <= {"passed", "left out"}
    seconds = {check["name"]: check["seconds"] for check in rehearsal["checks"]}
    return {"difference_of_log_probs": rehearsal["difference"], "passes": rehearsal["passes"], "seconds": seconds}


def run_in_turns_killed_and_resumed(
    device: str, task: TaskPaths, folder: Path, ray_dir: Path, environment: Any
) -> dict[str, Any]:
    """Run `partial_rollout`, kill it after a checkpoint and run it again; check that each answer is trained once.

    ``environment``: sets variables for the runs (pytest's ``monkeypatch``).
    """
    record = folder / "answers"
    environment.setenv("RECORD_FOLDER", str(record))
    environment.setenv("CRASH_AFTER_STEP", str(KILLED_AFTER))
    arguments = [*overrides(device, "partial_rollout", task, folder, ray_dir), "trainer.save_freq=1"]
    main = "partial_rollout:recording_trainer.RecordingTrainer"
    first = run_on(device, main, arguments, folder)
    assert first.returncode == 1
    assert first.rollout_state()["ledger"]["trained"] == KILLED_AFTER * GROUPS
    environment.setenv("CRASH_AFTER_STEP", "0")
    figures = check(run_on(device, main, arguments, folder), device)
    trained = trained_answers(record)
    assert len(trained) == STEPS * GROUPS * ANSWERS
    assert len({answer["uid"] for answer in trained}) == STEPS * GROUPS
    return figures

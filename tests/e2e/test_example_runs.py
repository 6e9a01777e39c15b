# SPDX-License-Identifier: Apache-2.0
"""The example scripts for FSDP2 in each of their modes, scaled down to the tiny model by further arguments, train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from main_process import FORKS, last_words, short_run
from main_runs import ENGINE, FinishedRun
from surroundings import shared_forks, user_environment, with_helpers

from recipe.laptop.task import TaskPaths

CHECKOUT = Path(__file__).parents[2]
STEPS, GROUPS, RUN_S = 2, 4, 480
ALL = ("one_step_off", "fully_async", "fully_async_servers", "partial_rollout")
DAPO = "recipe/partial_rollout/run_dapo_math17k_pr_4b_2node"
SERVERS = "examples/fully_async_log_prob_servers_fsdp2_8_8_8"
CASES = [
    *(("examples/qwen2_5_0_5b_gsm8k_2", mode) for mode in ALL if mode != "fully_async_servers"),
    *(("examples/qwen2_5_3b_gsm8k_8", mode) for mode in ALL),
    *(("examples/qwen2_5_7b_gsm8k_16", mode) for mode in ALL),
    (DAPO, "partial_rollout"),
]
# `SERVERS` trains in test_program_rewards. All of them compose and validate in every run of the tests
# (test_documented_commands).
MORE = {
    SERVERS: ["model_engine_server.replicas=1"],
    DAPO: [
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.rollout.max_model_len=128",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.actor.fsdp_config.param_offload=false",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
    ],
}
PLACES = {
    "one_step_off": ("trainer", "rollout"),
    "fully_async": ("trainer", "rollout"),
    "fully_async_servers": ("trainer", "rollout", "model_engine_server"),
    "partial_rollout": ("trainer",),
}
SCALED_DOWN = [
    "preset=tiny_cpu",
    f"actor_rollout_ref.rollout.name={ENGINE}",
    "data.max_prompt_length=32",
    "data.max_response_length=32",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "trainer.logger=[console]",
    "trainer.save_freq=-1",
    # The large scripts join a cluster; here the main starts its own.
    "++ray_kwargs.ray_init.address=null",
    "async_training.rehearsal=true",
    "async_training.alarms.exit_status=false",
    f"trainer.total_training_steps={STEPS}",
]


def run_example(name: str, mode: str, task: TaskPaths, folder: Path, ray_dir: Path, *more: str) -> FinishedRun:
    """A script with the tiny model's sizes in the place of its own, and ``more`` arguments; it must end well."""
    places = [f"{place}.{key}=1" for place in PLACES[mode] for key in ("nnodes", "n_gpus_per_node")]
    batch = [] if mode.startswith("fully_async") else [f"data.train_batch_size={GROUPS}"]
    overrides = [*SCALED_DOWN, *MORE.get(name, ()), *places, *batch, *short_run(task, folder, ray_dir), *more]
    environment = with_helpers(user_environment())
    # The scripts' `python` is what makes forks.
    forks = shared_forks(environment)
    overrides += [f"{FORKS}={forks}", "async_training.prefork_workers=false"]
    # One of them says `python3`, which is this environment's, activated or not.
    path = [str(forks.parent), str(Path(sys.executable).parent), environment["PATH"]]
    environment |= {"MODE": mode, "PATH": os.pathsep.join(path)}
    finished = subprocess.run(
        ["bash", str(CHECKOUT / f"{name}.sh"), *overrides],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert finished.returncode == 0, last_words(finished)
    run = FinishedRun(finished.returncode, finished.stdout, folder)
    assert (run.summary["steps"], run.summary["error"]) == (STEPS, None)
    assert run.summary["ledger"]["trained"] == STEPS * GROUPS
    rehearsal = run.summary["rehearsal"]
    assert rehearsal["fallbacks"] == []
    assert {check["outcome"] for check in rehearsal["checks"]} <= {"passed", "left out"}
    return run


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_example_trains_the_tiny_model(name: str, mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    run_example(name, mode, task, tmp_path, ray_dir)

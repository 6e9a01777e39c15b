# SPDX-License-Identifier: Apache-2.0
"""Makes real runs on emulated accelerators, for the error of the simulator (`plan_error.py`); each differs from `BASE`.

    python benchmarks/plan_runs.py runs/plan [--only base bound_3 ...]

A trainer rank stands for eight H100 and an engine for one, with a 7B model; a token of the run stands for 64, and time
runs 7 times as fast. Runs that exist already are skipped. Each keeps its record of events.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from mains import ray_folder, run, short_run, with_helpers

from benchmarks.emulation.devices import Emulation
from recipe.laptop.task import TaskSettings, ensure_task

ROLLOUT = "actor_rollout_ref.rollout"
DEVICES = Emulation(token_scale=64, time_scale=0.15, trainer_devices=8, computes=False)
REWARD = """import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=0.0):
    time.sleep(seconds)
    return float(solution_str == ground_truth)
"""


@dataclass(frozen=True)
class Scenario:
    """A run: its mode, devices and overrides."""

    overrides: tuple[str, ...] = ()
    devices: Emulation = DEVICES
    lengths: str = "long_tail"
    mode: str = "fully_async"
    batch: int = 16
    reward_s: float = 0.0
    steps: int = 16


def bound(versions: float, depth: float | None = None) -> tuple[str, ...]:
    depth = versions if depth is None else depth
    return f"async_training.max_staleness={versions:g}", f"async_training.staleness_threshold={depth}"


def every(batches: int) -> str:
    return f"async_training.trigger_parameter_sync_step={batches}"


BASE = Scenario(bound(1))
ELASTIC = "async_training.placement=elastic"
LENDS = replace(DEVICES, trainer_devices=2, shared=True)
SCENARIOS = {
    "base": BASE,
    "bound_0": Scenario(bound(0)),
    "bound_3": Scenario(bound(3)),
    "bound_3_depth_1": Scenario(bound(3, 1)),
    "bound_2_k_2": Scenario((*bound(2), every(2))),
    "uniform": Scenario(bound(1), lengths="uniform"),
    "uniform_bound_2": Scenario(bound(2), lengths="uniform"),
    "trainer_2": Scenario(bound(1), replace(DEVICES, trainer_devices=2)),
    "trainer_1_bound_3": Scenario(bound(3), replace(DEVICES, trainer_devices=1)),
    "replicas_2": Scenario((*bound(1), "rollout.n_gpus_per_node=2")),
    "drain": Scenario((*bound(2), "async_training.weights.at_swap=drain")),
    "keep": Scenario((*bound(3), "async_training.weights.at_swap=keep")),
    "answers_4": Scenario((*bound(1), f"{ROLLOUT}.n=4")),
    # This run has as many prompts as the others, because the fitted record has no more lengths.
    "batch_32": Scenario((*bound(1), "actor_rollout_ref.actor.ppo_mini_batch_size=32"), batch=32, steps=8),
    "places_64": Scenario((*bound(2), f"{ROLLOUT}.max_num_seqs=64", f"{ROLLOUT}.max_num_batched_tokens=16384")),
    "places_16": Scenario((*bound(2), f"{ROLLOUT}.max_num_seqs=16")),
    "rewards": Scenario((*bound(1), "async_training.reward_processes=8"), reward_s=0.4),
    "uniform_bound_0": Scenario(bound(0), lengths="uniform"),
    "uniform_rewards": Scenario((*bound(1), "async_training.reward_processes=8"), lengths="uniform", reward_s=0.4),
    "replicas_2_bound_3": Scenario((*bound(3), "rollout.n_gpus_per_node=2")),
    "batch_8_bound_3": Scenario((*bound(3), "actor_rollout_ref.actor.ppo_mini_batch_size=8"), batch=8),
    "one_step_off": Scenario(mode="one_step_off"),
    "partial_rollout": Scenario(bound(3), replace(DEVICES, shared=True), mode="partial_rollout"),
    "partial_rollout_bound_0": Scenario(bound(0), replace(DEVICES, shared=True), mode="partial_rollout"),
    "elastic": Scenario((*bound(1), ELASTIC), LENDS),
    "elastic_bound_3": Scenario((*bound(3), ELASTIC), LENDS),
    "elastic_uniform": Scenario((*bound(1), ELASTIC), LENDS, lengths="uniform"),
    "elastic_uniform_bound_2_k_2": Scenario((*bound(2), every(2), ELASTIC), LENDS, lengths="uniform"),
    "elastic_trainer_1": Scenario((*bound(2), ELASTIC), replace(LENDS, trainer_devices=1)),
}


def one_run(scenario: Scenario, folder: Path, tasks: Path) -> None:
    """Run it, with all of its output in ``folder``."""
    task = ensure_task(tasks / scenario.lengths, TaskSettings(lengths=scenario.lengths))
    folder.mkdir(parents=True)
    environment = with_helpers(os.environ) | scenario.devices.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment["PYTHONPATH"]])
    (folder / "agent_loops.yaml").write_text("- name: fixed\n  _target_: fixed_lengths.FixedLengthLoop\n")
    (folder / "reward.py").write_text(REWARD)
    reward = [
        f"reward.custom_reward_function.path={folder}/reward.py",
        f"+reward.custom_reward_function.reward_kwargs.seconds={scenario.reward_s}",
    ]
    with ray_folder() as ray_dir:
        overrides = [
            "preset=tiny_cpu_long_tail",
            *short_run(task, folder, ray_dir),
            *(reward if scenario.reward_s else ()),
            f"{ROLLOUT}.agent.agent_loop_config_path={folder}/agent_loops.yaml",
            f"{ROLLOUT}.agent.default_agent_loop=fixed",
            f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
            "actor_rollout_ref.model.external_lib=benchmarks.emulation.trainer",
            "algorithm.rollout_correction.bypass_mode=true",
            f"trainer.total_training_steps={scenario.steps}",
            *scenario.overrides,
        ]
        if scenario.mode != "partial_rollout":
            overrides += [
                f"{ROLLOUT}.checkpoint_engine.backend=emulated_gloo",
                f"{ROLLOUT}.checkpoint_engine.custom_backend_module=benchmarks.emulation.transfer",
                f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.emulated_gloo.timeout_s=60",
            ]
        run(f"recipe.{scenario.mode}.main", overrides, folder / "metrics.jsonl", folder, environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in arguments.only:
        folder = arguments.folder.resolve() / name
        if (folder / "summary.json").exists():
            continue
        try:
            one_run(SCENARIOS[name], folder, arguments.folder.resolve() / "tasks")
        except SystemExit as error:
            print(json.dumps({"run": name, "error": str(error)}), flush=True)
        else:
            print(json.dumps({"run": name}), flush=True)


if __name__ == "__main__":
    main()

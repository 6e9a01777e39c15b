# SPDX-License-Identifier: Apache-2.0
"""Compares steps per second of the fully-asynchronous main with stock verl's, on the same task and cores.

    python benchmarks/throughput.py [--steps 20] [--repeats 3]

There are one trainer rank and one replica, 16 prompts of 8 answers per step, a weight sync after each step, one version
of staleness, and interruption; answers have uniform lengths, then long-tailed ones (one in 20 is 20 times as long).
Both mains have the same preset, and both start their workers as forks, so only the steps differ. The rate is measured
in wall-clock time, without the first steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from mains import Run, ray_folder, run, short_run, stock

from recipe.laptop.prefork.run import Prefork
from recipe.laptop.task import TaskPaths, TaskSettings, ensure_task

CHECKOUT = Path(__file__).parents[1]
OURS = "recipe.fully_async.main"
BATCH, ANSWERS = 16, 8
SKIP = 4
PRESETS = {"uniform": "tiny_cpu", "long_tail": "tiny_cpu_long_tail"}


def overrides(task: TaskPaths, preset: str, steps: int, out: Path, ray_dir: Path, plus: str) -> list[str]:
    return [
        f"{plus}preset={preset}",
        *short_run(task, out, ray_dir),
        "algorithm.adv_estimator=grpo",
        f"trainer.total_training_steps={steps}",
        f"rollout.total_rollout_steps={steps * BATCH}",
    ]


def ours(task: TaskPaths, preset: str, steps: int) -> Run:
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        settings = overrides(task, preset, steps, Path(out), ray_dir, plus="")
        return run(OURS, settings, Path(out) / "metrics.jsonl", Path(out))


def theirs(task: TaskPaths, preset: str, steps: int) -> Run:
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        metrics = Path(out) / "stock.jsonl"
        environment = stock.stock_environment(CHECKOUT) | {"VERL_FILE_LOGGER_PATH": str(metrics)}
        with Prefork(environment) as forks:
            settings = [
                *overrides(task, preset, steps, Path(out), ray_dir, plus="+"),
                # The file's own search path works only within a verl checkout.
                "hydra.searchpath=[pkg://verl.trainer.config]",
                # This package's main sets these; stock's needs them by hand.
                "actor_rollout_ref.hybrid_engine=false",
                "data.gen_batch_size=1",
                f"rollout.n={ANSWERS}",
                "trainer.logger=[console,file]",
                f"ray_kwargs.ray_init.runtime_env.py_executable={forks.executable}",
            ]
            finished = run(stock.FULLY_ASYNC_MAIN, settings, metrics, Path(out), environment)
    finished.steps = [(at, line["data"]) for at, line in finished.steps if "actor/grad_norm" in line["data"]]
    return finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for lengths in arguments.lengths:
        preset = PRESETS[lengths]
        with tempfile.TemporaryDirectory() as folder:
            task = ensure_task(Path(folder) / "task", TaskSettings(lengths=lengths))
            ratios = []
            for _ in range(arguments.repeats):
                a, b = (side(task, preset, arguments.steps).seconds_per_step(SKIP) for side in (ours, theirs))
                ratios.append(b / a)
                row = {"lengths": lengths, "ours_s_per_step": round(a, 2), "stock_s_per_step": round(b, 2)}
                print(json.dumps(row | {"ours_over_stock_steps_per_s": round(b / a, 2)}), flush=True)
            print(json.dumps({"lengths": lengths, "median_ratio": round(statistics.median(ratios), 2)}), flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Measures how much of generation and training overlaps in the one-step-off mode.

    python benchmarks/overlap.py [--time-scale 0.64] [--steps 12] [--repeats 3]

It uses the uniform task of the race on the same emulated accelerators, whose work uses no core. Stage times come from
the synchronous mode (bound 0): T_gen is the trainer's wait for a batch, T_train the rest of a step.

    efficiency = max(T_gen, T_train) / seconds per step with bound 1.

With a smaller time scale, more of a step is work of this machine's cores, which both stages share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from mains import Run, ray_folder, short_run
from race import run_side, settings_of
from race_sides import TASKS, TOKEN_SCALE

from benchmarks.emulation.devices import Emulation
from recipe.laptop.task import TaskPaths, TaskSettings, ensure_task

SIDE, TASK = "one_step_off", TASKS["uniform"]
DEVICES = 4
"""Devices of each of the two stages."""
# Steps at the beginning that are not counted, and at the end, for which nothing is generated ahead.
SKIP, LAST = 2, 1


def one_run(bound: int, steps: int, time_scale: float, paths: TaskPaths) -> Run:
    emulation = Emulation(
        replica_devices=DEVICES, trainer_devices=DEVICES, token_scale=TOKEN_SCALE, time_scale=time_scale
    )
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        settings = [
            *short_run(paths, Path(out), ray_dir),
            *settings_of(SIDE, "threshold 1", TASK, steps, Path(out)),
            f"async_training.staleness_threshold={bound}",
        ]
        finished = run_side(SIDE, settings, Path(out), emulation)
    finished.steps = finished.steps[:-LAST]
    return finished


def stages(synchronous: Run) -> tuple[float, float]:
    """Return (T_gen, T_train): medians over the steps of a synchronous run."""
    steps = [metrics for _, metrics in synchronous.steps[SKIP:]]
    waits = [metrics["timing_s/gen"] for metrics in steps]
    rest = [metrics["timing_s/step"] - metrics["timing_s/gen"] for metrics in steps]
    return statistics.median(waits), statistics.median(rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-scale", type=float, default=0.64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    efficiencies = []
    with tempfile.TemporaryDirectory() as folder:
        paths = ensure_task(Path(folder), TaskSettings(lengths=TASK.lengths))
        for _ in range(arguments.repeats):
            together, apart = (one_run(bound, arguments.steps, arguments.time_scale, paths) for bound in (0, 1))
            generation, training = stages(together)
            step = apart.seconds_per_step(SKIP)
            efficiencies.append(max(generation, training) / step)
            row = {
                "T_gen": round(generation, 2),
                "T_train": round(training, 2),
                "step": round(step, 2),
                "efficiency": round(efficiencies[-1], 3),
                "sync_step_over_step": round(together.seconds_per_step(SKIP) / step, 3),
            }
            print(json.dumps(row), flush=True)
    print(json.dumps({"median_efficiency": round(statistics.median(efficiencies), 3)}))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Time from the start of a main to its first step: this package with and without forked workers, and stock verl.

    python benchmarks/startup.py [--repeats 3] [--only forked,rehearsed]

`rehearsed` is `forked` with a rehearsal, whose own seconds are printed as well. All run the built-in task with one
trainer rank and one replica, one after the other, alternately. It also prints when each process of the run appeared and
the CPU time that it had used when the first step was done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psutil
from mains import ray_folder, run, short_run, stock

from recipe.laptop.task import TaskPaths, TaskSettings, ensure_task

CHECKOUT = Path(__file__).parents[1]
SAMPLE_S = 1.0


class Processes:
    """Samples the processes below this one: name, seconds until it appeared, CPU seconds."""

    def __init__(self) -> None:
        self._began = time.time()
        self._seen: dict[int, tuple[float, str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for process in psutil.Process().children(recursive=True):
                try:
                    times = process.cpu_times()
                    name = process.name()
                    appeared = process.create_time() - self._began
                except psutil.Error:
                    continue
                self._seen[process.pid] = (appeared, name, times.user + times.system)

    def until(self, seconds: float) -> list[dict[str, object]]:
        self._stop.set()
        self._thread.join()
        return [
            {"appeared": round(appeared, 1), "process": name, "cpu_s": round(cpu, 1)}
            for appeared, name, cpu in sorted(self._seen.values())
            if appeared < seconds and cpu > 1
        ]


def ours(task: TaskPaths, out: Path, ray_dir: Path, forked: bool, rehearsed: bool) -> tuple[str, list[str], Path]:
    overrides = [
        "preset=tiny_cpu",
        *short_run(task, out, ray_dir),
        f"async_training.prefork_workers={forked}",
        f"async_training.rehearsal={rehearsed}",
        "trainer.total_training_steps=1",
    ]
    return "recipe.fully_async.main", overrides, out / "metrics.jsonl"


def theirs(task: TaskPaths, out: Path, ray_dir: Path) -> tuple[str, list[str], Path]:
    overrides = stock.cpu_overrides(task, out, ray_dir, devices=2) + stock.one_step_overrides(1)
    return stock.ONE_STEP_MAIN, overrides, out / "stock.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    variants = ("forked", "rehearsed", "not forked", "stock one-step-off")
    parser.add_argument("--only", default=",".join(variants), help="variants, separated by commas")
    options = parser.parse_args()
    repeats = options.repeats
    seconds: dict[str, list[float]] = {variant: [] for variant in variants if variant in options.only.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        task = ensure_task(Path(folder) / "task", TaskSettings())
        for repeat in range(repeats):
            for variant, times in seconds.items():
                with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
                    where = task, Path(out), ray_dir
                    name, overrides, metrics = (
                        theirs(*where)
                        if variant.startswith("stock")
                        else ours(*where, forked=variant != "not forked", rehearsed=variant == "rehearsed")
                    )
                    environment = stock.stock_environment(CHECKOUT) | {"VERL_FILE_LOGGER_PATH": str(metrics)}
                    processes = Processes()
                    result = run(name, overrides, metrics, Path(out), environment)
                    times.append(result.steps[0][0])
                    row = {"variant": variant, "first_step_s": round(times[-1], 1)}
                    if variant == "rehearsed":
                        rehearsal = json.loads((Path(out) / "summary.json").read_text())["rehearsal"]
                        row["rehearsal_s"] = round(rehearsal["seconds"], 2)
                    seen = processes.until(times[-1])
                    print(json.dumps(row | ({"processes": seen} if repeat == 0 else {})), flush=True)
    medians = {variant: round(statistics.median(times), 1) for variant, times in seconds.items()}
    print(json.dumps({"median_first_step_s": medians}))


if __name__ == "__main__":
    main()

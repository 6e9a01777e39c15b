# SPDX-License-Identifier: Apache-2.0
"""From the start of a main to its first step: this package with and without forked workers, and stock verl.

    python benchmarks/startup.py [--repeats 3]

All three run the built-in task with one trainer rank and one replica, one after the other, in turns. Also printed: when
each process of the run appeared and the CPU time that it had used when the first step was done.
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

from recipe.async_engine.task import TaskPaths, TaskSettings, ensure_task

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


def ours(task: TaskPaths, out: Path, ray_dir: Path, forked: bool) -> tuple[str, list[str], Path]:
    overrides = [
        "preset=tiny_cpu",
        *short_run(task, out, ray_dir),
        f"async_training.prefork_workers={forked}",
        "trainer.total_training_steps=1",
    ]
    return "recipe.fully_async.main", overrides, out / "metrics.jsonl"


def theirs(task: TaskPaths, out: Path, ray_dir: Path) -> tuple[str, list[str], Path]:
    overrides = stock.cpu_overrides(task, out, ray_dir, devices=2) + stock.one_step_overrides(1)
    return stock.ONE_STEP_MAIN, overrides, out / "stock.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    seconds: dict[str, list[float]] = {"forked": [], "not forked": [], "stock one-step-off": []}
    with tempfile.TemporaryDirectory() as folder:
        task = ensure_task(Path(folder) / "task", TaskSettings())
        for repeat in range(repeats):
            for variant, times in seconds.items():
                with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
                    build = theirs if variant.startswith("stock") else lambda *a, v=variant: ours(*a, v == "forked")
                    name, overrides, metrics = build(task, Path(out), ray_dir)
                    environment = stock.stock_environment(CHECKOUT) | {"VERL_FILE_LOGGER_PATH": str(metrics)}
                    processes = Processes()
                    result = run(name, overrides, metrics, Path(out), environment)
                    times.append(result.steps[0][0])
                    row = {"variant": variant, "first_step_s": round(times[-1], 1)}
                    seen = processes.until(times[-1])
                    print(json.dumps(row | ({"processes": seen} if repeat == 0 else {})), flush=True)
    medians = {variant: round(statistics.median(times), 1) for variant, times in seconds.items()}
    print(json.dumps({"median_first_step_s": medians}))


if __name__ == "__main__":
    main()

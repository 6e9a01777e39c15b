# SPDX-License-Identifier: Apache-2.0
"""Measures whether a long run grows: memory and open files over the steps of one run of the main `fully_async`.

    python benchmarks/long_run.py [--steps 2000]

The run has batches of 4 prompts x 4 answers of the built-in task, and a checkpoint every 100 steps of which the newest
is kept. Every few seconds the memory that belongs to each process alone (USS) and its open file descriptors are
sampled. The results, for all processes together and for the three whose memory grows most: the mean after a quarter of
the steps and at the end, and the slope of a least-squares line between, per 1,000 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
from mains import ray_folder

from recipe.async_engine.record.run_record import WITH_ALARMS

MAIN = "recipe.fully_async.main"
LOOK_S = 5.0
MIB = 1 << 20
Sample = tuple[int, float, int]


def steps_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def name_of(process: psutil.Process) -> str:
    """Return a readable name; Ray's workers have the name of their actor in their title."""
    title = " ".join(process.cmdline())
    return title if title.startswith("ray::") else Path(title.split(" ")[0]).name + " " + title[-40:]


def look(root: psutil.Process, step: int, samples: dict[str, list[Sample]]) -> None:
    """Sample each process's memory and open files."""
    total_memory, total_files = 0.0, 0
    for process in [root, *root.children(recursive=True)]:
        try:
            memory, files = process.memory_full_info().uss / MIB, process.num_fds()
            samples[f"{process.pid} {name_of(process)}"].append((step, memory, files))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        total_memory, total_files = total_memory + memory, total_files + files
    samples["all"].append((step, total_memory, total_files))


def growth(samples: list[Sample], steps: int) -> dict[str, float]:
    """Return the growth over the last three quarters of the run."""
    kept = np.array([sample for sample in samples if sample[0] >= steps / 4], dtype=float)
    if len(kept) < 10:
        return {}
    tenth = max(1, len(kept) // 10)
    row = {}
    for column, what in ((1, "memory_mib"), (2, "files")):
        slope = np.polyfit(kept[:, 0], kept[:, column], 1)[0]
        row[f"{what}_after_a_quarter"] = round(float(kept[:tenth, column].mean()), 1)
        row[f"{what}_at_the_end"] = round(float(kept[-tenth:, column].mean()), 1)
        row[f"{what}_per_1000_steps"] = round(1000 * float(slope), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        folder = Path(out)
        overrides = [
            "preset=tiny_cpu",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=4",
            "trainer.total_epochs=100",
            f"trainer.total_training_steps={arguments.steps}",
            "trainer.save_freq=100",
            "trainer.max_actor_ckpt_to_keep=1",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            f"trainer.default_local_dir={folder}",
            f"hydra.run.dir={folder}/hydra",
            f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        ]
        samples: dict[str, list[Sample]] = defaultdict(list)
        with (folder / "output.txt").open("w") as output:
            run = subprocess.Popen(
                [sys.executable, "-m", MAIN, *overrides], cwd=folder, stdout=output, stderr=subprocess.STDOUT
            )
            root = psutil.Process(run.pid)
            while run.poll() is None:
                step = steps_done(folder)
                if step > 0 and root.is_running():
                    look(root, step, samples)
                time.sleep(LOOK_S)
        if run.returncode not in (0, WITH_ALARMS):
            sys.stderr.write((folder / "output.txt").read_text()[-6000:])
            raise SystemExit(f"the run ended with status {run.returncode}")
        summary = json.loads((folder / "summary.json").read_text())
    print(json.dumps({"steps": summary["steps"], "seconds": round(summary["wall_seconds"])}))
    rows = {name: growth(kept, arguments.steps) for name, kept in samples.items()}
    print(json.dumps({"process": "all", **rows.pop("all")}))
    grown = sorted((row["memory_mib_per_1000_steps"], name) for name, row in rows.items() if row)
    for _, name in reversed(grown[-3:]):
        print(json.dumps({"process": name, **rows[name]}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

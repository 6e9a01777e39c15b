# SPDX-License-Identifier: Apache-2.0
"""Measures how long generation pauses for a weight sync, for each way in which weights get into the engine.

    python benchmarks/weight_swap.py [--models tiny 0.5B] [--repeats 10] [--engine sglang]

It uses one real rollout replica under requests, the real publisher, and a sender in place of a trainer; decode steps
take a fixed time that uses no core (`benchmarks.emulation`). The ways alternate, one sync each. The results are medians
of: the whole sync, its transfer, the pause of generation as the publisher sees it (from its call, which waits for the
end of a decode step) and its share of the sync, the time for which the engine took no step, and the rate of decode
steps while weights were staged relative to the rate in an equally long time before. SGLang's decode steps compute, and
are not recorded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mains import ray_folder, with_helpers
from sync_in_run import half_billion

from benchmarks.emulation.devices import Emulation, records
from recipe.laptop.choice import CPU_ENVIRONMENT
from recipe.laptop.task import TaskSettings, ensure_task

STEP_S = 0.05
ROLLOUT = "actor_rollout_ref.rollout"
LARGE = [
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=320",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "actor_rollout_ref.rollout.max_num_batched_tokens=1024",
]


def rate(record: Path, began: float, ended: float) -> float:
    """Return decode steps per second between two moments."""
    lines = [line for found in records(record).values() for line in found if line["kind"] == "step"]
    steps = sum(began < line["began"] + STEP_S <= ended for line in lines)
    return steps / (ended - began)


def stood_still(record: Path, began: float, ended: float) -> float:
    """Return the longest time without a decode step that overlaps the time between two moments."""
    lines = [line for found in records(record).values() for line in found if line["kind"] == "step"]
    steps = sorted((line["began"], line["began"] + line["device_s"] + line["late_s"]) for line in lines)
    gaps = ((end, start) for (_, end), (start, _) in itertools.pairwise(steps))
    return max((start - end for end, start in gaps if end <= ended and start >= began), default=0.0)


def measure(path: str, overrides: list[str], record: Path | None, repeats: int) -> dict[str, list[dict[str, float]]]:
    # verl reads its platform when it is imported.
    from swap_scenario import WAYS, Requests, start

    from recipe.async_engine.rollout.client import ResumingClient

    emulated = f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension"
    manager, publisher = start(path, [*overrides, emulated])
    versions = itertools.count()
    publisher.publish(next(versions))
    requests = Requests(manager.get_client(ResumingClient))
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    pauses: list[tuple[str, float, float]] = []
    for _ in range(repeats):
        for way, weights in WAYS.items():
            time.sleep(2.0)
            publisher.weights = weights
            began = time.time()
            staged = publisher.stage(next(versions))
            ended = time.time()
            swapped = time.time()
            publisher.swap(staged)
            metrics = publisher.resume(staged)
            pauses.append((way, swapped, time.time()))
            row = {
                "sync_s": metrics["fully_async/weight_sync/seconds"],
                "transfer_s": metrics["weight_sync/seconds"],
                "paused_s": metrics["fully_async/weight_sync/generation_paused_seconds"],
            }
            row["paused_share"] = row["paused_s"] / row["sync_s"]
            if record is not None and weights.staging != "none":
                before = rate(record, began - (ended - began), began)
                row["decode_rate_while_staged"] = rate(record, began, ended) / before
            found[way].append(row)
    time.sleep(2.0)
    requests.stop()
    for way, rows in found.items() if record is not None else ():
        for row, (_, began, ended) in zip(rows, (pause for pause in pauses if pause[0] == way), strict=True):
            row["stood_still_s"] = stood_still(record, began, ended)
            row["stood_still_share"] = row["stood_still_s"] / row["sync_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("tiny", "0.5B"), default=("tiny", "0.5B"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    arguments = parser.parse_args()
    here = str(Path(__file__).parent)
    os.environ |= {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([here, with_helpers(os.environ)["PYTHONPATH"]])
    import ray

    with tempfile.TemporaryDirectory() as folder:
        task = ensure_task(Path(folder) / "task", TaskSettings())
        for model in arguments.models:
            large = model == "0.5B"
            path = half_billion(task, Path(folder) / "large") if large else task.model
            record = Path(folder) / f"{model}-record"
            os.environ |= Emulation(decode_step_s=STEP_S, computes=False, record=str(record)).environment()
            with ray_folder() as ray_dir:
                ray.init(num_cpus=20, num_gpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=str(ray_dir))
                try:
                    overrides = [f"{ROLLOUT}.name={arguments.engine}", *(LARGE if large else ())]
                    steps = record if arguments.engine == "vllm" else None
                    found: dict[str, Any] = measure(str(path), overrides, steps, arguments.repeats)
                finally:
                    ray.shutdown()
            for way, rows in found.items():
                medians = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
                print(json.dumps({"model": model, "way": way, "syncs": len(rows), **medians}), flush=True)


if __name__ == "__main__":
    sys.exit(main())

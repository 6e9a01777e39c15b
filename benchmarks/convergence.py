# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Learning on the built-in task by mode and staleness bound, over several seeds.

    python benchmarks/convergence.py runs/convergence.jsonl [--steps 50] [--seeds 3] [--only sync one_step_off]
    python benchmarks/plot_convergence.py runs/convergence.jsonl docs/convergence.svg

Appends one line a run: variant, seed, the mean reward and the seconds since the first step for each step, and the final
validation score. Runs that the file has already are left out, so an interrupted sweep goes on where it stopped. At the
end it prints the final scores of each variant, with their spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mains import run, short_folder

ONE_STEP_OFF, FULLY_ASYNC = "recipe.one_step_off.main", "recipe.fully_async.main"
CORRECTED = ["algorithm.rollout_correction.bypass_mode=false", "algorithm.rollout_correction.rollout_is=token"]

STEPS = 50

VARIANTS: dict[str, tuple[str, list[str]]] = {
    "sync": (ONE_STEP_OFF, ["async_training.staleness_threshold=0"]),
    "one_step_off": (ONE_STEP_OFF, []),
    **{f"fully_async S={bound}": (FULLY_ASYNC, [f"async_training.staleness_threshold={bound}"]) for bound in (1, 2, 4)},
    **{
        f"fully_async S={bound}, corrected": (FULLY_ASYNC, [f"async_training.staleness_threshold={bound}", *CORRECTED])
        for bound in (1, 2, 4)
    },
}


def one_run(variant: str, seed: int, steps: int, task: Path) -> dict[str, Any]:
    main, settings = VARIANTS[variant]
    with short_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        overrides = [
            "preset=tiny_cpu",
            f"builtin_task.dir={task}",
            *settings,
            f"data.seed={seed}",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"trainer.total_training_steps={steps}",
            f"trainer.test_freq={steps}",
            f"trainer.default_local_dir={out}",
            f"hydra.run.dir={out}/hydra",
            f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        ]
        result = run(main, overrides, Path(out) / "metrics.jsonl", Path(out))
        summary = json.loads((Path(out) / "summary.json").read_text())
    began = result.steps[0][0]
    return {
        "variant": variant,
        "seed": seed,
        "reward": [round(metrics["critic/score/mean"], 4) for _, metrics in result.steps],
        "seconds": [round(seconds - began, 2) for seconds, _ in result.steps],
        "first": summary["validation"]["first"],
        "last": summary["validation"]["last"],
        "staleness": summary["staleness"],
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sweep(results: Path, steps: int, seeds: int, variants: Sequence[str] = tuple(VARIANTS)) -> list[dict[str, Any]]:
    """Do the runs that ``results`` does not have yet; returns all rows of the file."""
    results.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["variant"], row["seed"]) for row in read(results)}
    with tempfile.TemporaryDirectory() as task:
        for seed in range(seeds):
            for variant in variants:
                if (variant, seed) in done:
                    continue
                row = one_run(variant, seed, steps, Path(task))
                with results.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
                print(variant, seed, row["first"], row["last"], flush=True)
    return read(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=sorted(VARIANTS), default=list(VARIANTS))
    arguments = parser.parse_args()
    rows = sweep(arguments.results, arguments.steps, arguments.seeds, arguments.only)
    for variant in VARIANTS:
        scores = [row["last"] for row in rows if row["variant"] == variant]
        if scores:
            spread = f"{min(scores):.3f} to {max(scores):.3f}"
            seconds = statistics.mean(row["seconds"][-1] for row in rows if row["variant"] == variant)
            print(f"{variant:28} {statistics.mean(scores):.3f} ({spread}, {len(scores)} seeds), {seconds:.0f} s")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Learning on the built-in task by mode and staleness bound, over several seeds.

    python benchmarks/convergence.py runs/convergence.jsonl [--steps 50] [--seeds 3] [--only sync one_step_off]
    python benchmarks/convergence.py runs/long_tail.jsonl --task long_tail
    python benchmarks/convergence.py runs/far_behind.jsonl --task far_behind
    python benchmarks/plot_convergence.py runs/convergence.jsonl docs/convergence.svg

Each run appends one line: variant, seed, for each step the mean reward and the seconds since the first step, the final
validation score, and how far the sampling policy was from the trained one. Runs that are in the file already are
skipped, so an interrupted sweep continues. At the end the final scores of each variant are printed with their spread.
The long-tailed task is that of partial rollout, in which long answers become several versions old.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mains import ray_folder, run

ONE_STEP_OFF, FULLY_ASYNC, PARTIAL = (
    f"recipe.{mode}.main" for mode in ("one_step_off", "fully_async", "partial_rollout")
)
CORRECTED = ["algorithm.rollout_correction.bypass_mode=false", "algorithm.rollout_correction.rollout_is=token"]
UNCORRECTED = ["algorithm.rollout_correction.rollout_is=null"]
# Twice the preset's places: a batch then takes a fifth of the decode steps of a long answer.
LONG_TAIL = ["actor_rollout_ref.rollout.max_num_seqs=64", "actor_rollout_ref.rollout.max_num_batched_tokens=16384"]

# Eight times the preset's places, which then hold answers of several versions, and updates that change the policy a
# lot.
FAR = [
    "actor_rollout_ref.rollout.max_num_seqs=256",
    "actor_rollout_ref.rollout.max_num_batched_tokens=65536",
    "actor_rollout_ref.actor.optim.lr=1e-3",
]

STEPS = 50
LAST = 10
MISMATCH = ("rollout_corr/kl", "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_is_max")


def _depth(versions: int) -> list[str]:
    return [f"async_training.staleness_threshold={versions}", f"async_training.max_staleness={versions}"]


def _turns(depth: int, bound: int) -> list[str]:
    return [*LONG_TAIL, f"async_training.staleness_threshold={depth}", f"async_training.max_staleness={bound}"]


@dataclass(frozen=True)
class Task:
    """The variants that are compared on a preset: main and settings by name; the first one is synchronous training."""

    preset: str
    variants: dict[str, tuple[str, list[str]]]


TASKS = {
    "uniform": Task(
        "tiny_cpu",
        {
            "sync": (ONE_STEP_OFF, _depth(0)),
            "one_step_off": (ONE_STEP_OFF, []),
            **{f"fully_async S={bound}": (FULLY_ASYNC, _depth(bound)) for bound in (1, 2, 4)},
            **{f"fully_async S={bound}, corrected": (FULLY_ASYNC, [*_depth(bound), *CORRECTED]) for bound in (1, 2, 4)},
        },
    ),
    "long_tail": Task(
        "tiny_cpu_long_tail",
        {
            "sync": (PARTIAL, _turns(0, 0)),
            "partial_rollout S=2, corrected": (PARTIAL, _turns(1, 2)),
            "partial_rollout S=8, corrected": (PARTIAL, _turns(1, 8)),
            "partial_rollout S=8": (PARTIAL, [*_turns(1, 8), *UNCORRECTED]),
        },
    ),
    # The effect of a large bound on a policy that changes quickly, with correction and without.
    "far_behind": Task(
        "tiny_cpu_long_tail",
        {
            "sync": (PARTIAL, [*_turns(0, 0), *FAR]),
            "partial_rollout S=8, corrected": (PARTIAL, [*_turns(8, 8), *FAR]),
            "partial_rollout S=8": (PARTIAL, [*_turns(8, 8), *FAR, *UNCORRECTED]),
        },
    ),
}


def one_run(task: Task, variant: str, seed: int, steps: int, data: Path) -> dict[str, Any]:
    main, settings = task.variants[variant]
    with ray_folder() as ray_dir, tempfile.TemporaryDirectory() as out:
        overrides = [
            f"preset={task.preset}",
            f"builtin_task.dir={data}",
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
    measured = [key for key in MISMATCH if all(key in step for _, step in result.steps[-LAST:])]
    return {
        "variant": variant,
        "seed": seed,
        "reward": [round(metrics["critic/score/mean"], 4) for _, metrics in result.steps],
        "seconds": [round(seconds - began, 2) for seconds, _ in result.steps],
        "first": summary["validation"]["first"],
        "last": summary["validation"]["last"],
        "staleness": summary["staleness"],
        "mismatch": {key: statistics.fmean(step[key] for _, step in result.steps[-LAST:]) for key in measured},
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sweep(
    results: Path, steps: int, seeds: int, task: Task, variants: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Run what ``results`` does not contain yet; return all rows of the file."""
    results.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["variant"], row["seed"]) for row in read(results)}
    with tempfile.TemporaryDirectory() as data:
        for seed in range(seeds):
            for variant in variants or task.variants:
                if (variant, seed) in done:
                    continue
                row = one_run(task, variant, seed, steps, Path(data))
                with results.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
                print(variant, seed, row["first"], row["last"], flush=True)
    return read(results)


def report(variant: str, rows: list[dict[str, Any]]) -> str:
    """Return a line: scores with their range, mean reward of the last steps, staleness, mismatch, seconds."""
    scores = [row["last"] for row in rows]
    reward = statistics.fmean(statistics.fmean(row["reward"][-LAST:]) for row in rows)
    staleness = statistics.fmean(row["staleness"]["mean"] for row in rows)
    mismatch = {
        key.removeprefix("rollout_corr/"): round(statistics.fmean(row["mismatch"][key] for row in rows), 4)
        for key in MISMATCH
        if all(key in row.get("mismatch", ()) for row in rows)
    }
    seconds = statistics.fmean(row["seconds"][-1] for row in rows)
    return (
        f"{variant:45} {statistics.fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f}, {len(scores)} seeds), "
        f"reward {reward:.3f}, staleness {staleness:.2f}, {mismatch}, {seconds:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", choices=list(TASKS), default="uniform")
    parser.add_argument("--only", nargs="+", help="variants; by default all of the task")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    if unknown := set(arguments.only or ()) - set(task.variants):
        parser.error(f"--only: {', '.join(sorted(unknown))}; the variants are {', '.join(task.variants)}")
    rows = sweep(arguments.results, arguments.steps, arguments.seeds, task, arguments.only)
    for variant in task.variants:
        if own := [row for row in rows if row["variant"] == variant]:
            print(report(variant, own))


if __name__ == "__main__":
    main()

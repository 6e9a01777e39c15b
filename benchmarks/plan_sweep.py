# SPDX-License-Identifier: Apache-2.0
"""Measures whether the advisor's first choice is the best: all of its candidates are run on emulated devices.

    python benchmarks/plan_sweep.py runs/sweep [--only long_tail ...] [--steps 48]

For each scenario one run on one trainer accelerator and one replica is recorded. ``python -m recipe.plan`` is then
asked for advice on it for `ACCELERATORS`, as a user would do, and each candidate runs with the overrides that the
advisor prints. Runs that exist already are skipped. ``--steps`` applies to the candidates' runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from documents import table
from plan_error import compared, ended, errors
from plan_runs import DEVICES, Scenario, bound, one_run

from recipe.plan.times import fitted
from recipe.report.run import load

ACCELERATORS, SKIP = 4, 4
# verl's default, which the tiny preset disables.
BALANCED = "trainer.balance_batch=true"
ONE = replace(DEVICES, trainer_devices=1)
SCENARIOS = {
    "long_tail": Scenario((*bound(1), BALANCED), ONE),
    "uniform": Scenario((*bound(1), BALANCED), ONE, lengths="uniform"),
    "slow_rewards": Scenario((*bound(1), BALANCED, "async_training.reward_processes=8"), ONE, reward_s=0.4),
}
COMPARED = ("real_s", "predicted_s", "error_percent", "staleness", "predicted_staleness", "worst_class")


def advised(run: Path) -> list[dict[str, Any]]:
    """Return the advisor's candidates, best first."""
    command = [sys.executable, "-m", "recipe.plan", str(run), "--accelerators", str(ACCELERATORS), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return list(found["best"])


def name_of(candidate: dict[str, Any]) -> str:
    return f"{candidate['trainer_accelerators']}+{candidate['rollout_accelerators']} bound {candidate['max_staleness']}"


def run_all(scenario: Scenario, folder: Path, steps: int) -> list[dict[str, Any]]:
    """Run missing candidates; return each with its prediction, its ``real`` tokens per second, and `compared`."""
    fit = folder / "fit"
    run_unless_ended(scenario, fit)
    found = advised(fit)
    for candidate in found:
        there = folder / name_of(candidate).replace(" ", "_")
        overrides = (*scenario.overrides, *candidate["overrides"].split())
        run_unless_ended(replace(scenario, overrides=overrides, steps=steps), there)
        candidate["real"] = tokens_per_s(there)
        candidate |= compared(there, fitted(fit)[0])
    return found


def run_unless_ended(scenario: Scenario, folder: Path) -> None:
    if not ended(folder):
        shutil.rmtree(folder, ignore_errors=True)
        one_run(scenario, folder, folder.parents[1] / "tasks")
        print(folder, flush=True)


def tokens_per_s(folder: Path) -> float:
    """Return trained tokens per second, after the first steps."""
    lines = [line for line in load(folder).metrics if line.get("training/global_step")]
    tokens = sum(line["fully_async/sampled_tokens"] for line in lines[SKIP:])
    return float(tokens / (lines[-1]["wall_seconds"] - lines[SKIP - 1]["wall_seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--steps", type=int, default=Scenario.steps)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    head = ["scenario", "trainer + rollout, bound", "advised tokens/s", "real", "s a step", "predicted"]
    head += ["error %", "staleness", "predicted", "class most off, points"]
    lines, said, everything = [], [], []
    for name in options.only:
        found = run_all(SCENARIOS[name], options.folder.resolve() / name, options.steps)
        for candidate in found:
            cells = [f"`{name}`", name_of(candidate), f"{candidate['tokens_per_s']:.0f}", f"{candidate['real']:.0f}"]
            lines.append([*cells, *(candidate[key] for key in COMPARED)])
        first, best = found[0], max(found, key=lambda candidate: candidate["real"])
        lost = 100 * (1 - first["real"] / best["real"])
        said.append(f"- `{name}`: chosen {name_of(first)}, best {name_of(best)}, {lost:.1f}% from it")
        everything += found
    print("\n".join([table(head, lines), "", *said, "", f"{errors(everything)}."]))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Whether the advisor's first choice is the best one: every candidate that it compares is run, on emulated devices.

    python benchmarks/plan_sweep.py runs/sweep [--only long_tail ...] [--write docs/plan.md]

Of each scenario one run on one trainer accelerator and one replica is recorded. ``python -m recipe.plan`` is asked
about it, as its user asks, for `ACCELERATORS`; then each candidate runs with the line that the advisor gives to paste.
Runs that are there already are left alone. ``--write`` puts the table into that document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from plan_error import ended
from plan_runs import DEVICES, Scenario, bound, one_run

from recipe.report.run import load

ACCELERATORS, SKIP = 4, 4
ONE = replace(DEVICES, trainer_devices=1)
SCENARIOS = {
    "long_tail": Scenario(bound(1), ONE),
    "uniform": Scenario(bound(1), ONE, lengths="uniform"),
    "slow_rewards": Scenario((*bound(1), "async_training.reward_processes=8"), ONE, reward_s=0.4),
}
BEGINS, ENDS = "<!-- sweeps -->", "<!-- end of sweeps -->"


def advised(run: Path) -> list[dict[str, Any]]:
    """The advisor's candidates, the best first."""
    command = [sys.executable, "-m", "recipe.plan", str(run), "--accelerators", str(ACCELERATORS), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return list(found["best"])


def name_of(candidate: dict[str, Any]) -> str:
    return f"{candidate['trainer_accelerators']}+{candidate['rollout_accelerators']} bound {candidate['max_staleness']}"


def run_all(scenario: Scenario, folder: Path) -> list[dict[str, Any]]:
    """Run what is not there; of each candidate what was said of it, and the ``real`` tokens a second."""
    fit = folder / "fit"
    if not ended(fit):
        one_run(scenario, fit, folder.parent / "tasks")
    found = advised(fit)
    for candidate in found:
        there = folder / name_of(candidate).replace(" ", "_")
        if not ended(there):
            overrides = (*scenario.overrides, *candidate["overrides"].split())
            one_run(replace(scenario, overrides=overrides), there, folder.parent / "tasks")
            print(there, flush=True)
        candidate["real"] = tokens_per_s(there)
    return found


def tokens_per_s(folder: Path) -> float:
    """Trained ones, after the first steps."""
    lines = [line for line in load(folder).metrics if line.get("training/global_step")]
    tokens = sum(line["fully_async/sampled_tokens"] for line in lines[SKIP:])
    return float(tokens / (lines[-1]["wall_seconds"] - lines[SKIP - 1]["wall_seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = ["| scenario | trainer + rollout, bound | predicted tokens/s | real | off |", "|---|---|---|---|---|"]
    said = []
    for name in options.only:
        found = run_all(SCENARIOS[name], options.folder.resolve() / name)
        for candidate in found:
            said_of_it, real = candidate["tokens_per_s"], candidate["real"]
            off = 100 * (real / said_of_it - 1)
            lines.append(f"| `{name}` | {name_of(candidate)} | {said_of_it:.0f} | {real:.0f} | {off:+.0f}% |")
        first, best = found[0], max(found, key=lambda candidate: candidate["real"])
        lost = 100 * (1 - first["real"] / best["real"])
        said.append(f"- `{name}`: chosen {name_of(first)}, best {name_of(best)}, {lost:.1f}% from it")
    text = "\n".join([*lines, "", *said])
    print(text)
    if options.write is not None:
        page = options.write.read_text()
        options.write.write_text(f"{page.split(BEGINS)[0]}{BEGINS}\n{text}\n{ENDS}{page.split(ENDS)[1]}")


if __name__ == "__main__":
    main()

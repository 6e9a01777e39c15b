# SPDX-License-Identifier: Apache-2.0
"""Measures the simulator's error: fitted on one real run, it predicts the other runs of `plan_runs.py`.

    python benchmarks/plan_error.py runs/plan [--fit base]
    python benchmarks/plan_error.py --itself runs/demo      # any run, predicted from its own record

The simulator is given what a user would set for the predicted run (mode, bounds, devices, lengths, time of a reward)
and the record of the fitted run. Compared are seconds per step after the first ones, mean staleness, and each class of
the account as a share of trainer and rollout engines without their start-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

from plan_runs import SCENARIOS

from recipe.plan.__main__ import of_run
from recipe.plan.lending import simulated
from recipe.plan.times import Times, fitted
from recipe.report.account import Account
from recipe.report.advice import sides
from recipe.report.run import load

SKIP = 4
SWEEPS = {
    "bound, long tails": ["bound_0", "base", "bound_3"],
    "bound, uniform answers": ["uniform_bound_0", "uniform", "uniform_bound_2"],
    "bound, two replicas": ["replicas_2", "replicas_2_bound_3"],
    "places": ["places_16", "places_64"],
    "placement and bound": ["bound_0", "one_step_off", "base", "partial_rollout_bound_0", "partial_rollout", "bound_3"],
}
"""Sets of runs that a user would choose from; the one with the shortest steps is the best."""


def shares(account: Account) -> dict[tuple[str, str], float]:
    found = {}
    for side, seconds in sides(account).items():
        whole = sum(value for name, value in seconds.items() if name != "start_up")
        found.update({(side, name): value / whole for name, value in seconds.items() if name != "start_up"})
    return found


def told(times: Times, name: str, fit: str) -> Times:
    """Return the fitted times, changed by what the user of the other run has set."""
    there, here = SCENARIOS[fit], SCENARIOS[name]
    ratio = there.devices.trainer_devices / here.devices.trainer_devices
    changed = replace(times, update_s=lambda lengths, ranks: times.update_s(lengths, ranks / ratio))
    if here.lengths != there.lengths:
        changed = replace(changed, groups=((6,) * 8,) if here.lengths == "uniform" else times.groups)
    if here.reward_s:
        rewards = (here.reward_s + statistics.median(times.rewards),)
        changed = replace(changed, rewards=rewards)
    return changed


def ended(folder: Path) -> bool:
    """Return whether the run exists and came to its end."""
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["error"] is None


def row(folder: Path, fit: Path) -> dict[str, float | str]:
    times, _ = fitted(fit)
    return {"run": folder.name, **compared(folder, told(times, folder.name, fit.name))}


def compared(folder: Path, times: Times) -> dict[str, float | str]:
    """Compare a run with the simulator's prediction."""
    real = load(folder)
    lines = [line["wall_seconds"] for line in real.metrics if line.get("training/global_step")]
    seen = (lines[-1] - lines[SKIP - 1]) / (len(lines) - SKIP)
    scenario = of_run(real, len(lines))
    # All runs have the same prompts in the same order.
    result = simulated(scenario, times, seed=None).run()
    said = result.step_s(SKIP)
    was, would = shares(real.account), shares(result.account)
    worst = max({*was, *would}, key=lambda key: abs(was.get(key, 0.0) - would.get(key, 0.0)))
    return {
        "real_s": round(seen, 2),
        "predicted_s": round(said, 2),
        "error_percent": round(100 * (seen / said - 1), 1),
        "staleness": round(real.summary["staleness"]["mean"], 2),
        "predicted_staleness": round(result.staleness, 2),
        "worst_class": f"{worst[0]} {worst[1]} {100 * (would.get(worst, 0.0) - was.get(worst, 0.0)):+.0f}",
    }


def errors(rows: list[dict[str, float | str]]) -> str:
    """Return a sentence on the errors of these predictions."""
    seconds = [abs(float(one["error_percent"])) for one in rows]
    ages = [abs(float(one["staleness"]) - float(one["predicted_staleness"])) for one in rows]
    classes = [abs(int(str(one["worst_class"]).rpartition(" ")[2])) for one in rows]
    return (
        f"{len(rows)} runs: seconds a step are off by {statistics.median(seconds):.1f}% in the median, "
        f"{max(seconds):.1f}% at most; staleness by {statistics.median(ages):.2f} and {max(ages):.2f} versions, within "
        f"0.15 in {sum(age <= 0.15 for age in ages)} runs; every class is within 3 points in "
        f"{sum(points <= 3 for points in classes)}"
    )


def choices(rows: list[dict[str, float | str]]) -> list[str]:
    """Return, for each sweep whose runs exist, the run predicted to be fastest and its distance from the best."""
    real, predicted = ({str(one["run"]): float(one[key]) for one in rows} for key in ("real_s", "predicted_s"))
    said = []
    for what, names in SWEEPS.items():
        if real.keys() >= set(names):
            chosen, best = min(names, key=predicted.__getitem__), min(names, key=real.__getitem__)
            off = 100 * (real[chosen] / real[best] - 1)
            said.append(f"{what} ({len(names)} runs): chosen {chosen}, best {best}, {off:.1f}% from it")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--fit", default="base")
    parser.add_argument("--itself", type=Path)
    arguments = parser.parse_args()
    if arguments.itself is not None:
        print(json.dumps(compared(arguments.itself, fitted(arguments.itself)[0])))
        return
    made = [name for name in SCENARIOS if ended(arguments.folder / name)]
    rows = [row(arguments.folder / name, arguments.folder / arguments.fit) for name in made]
    for one in rows:
        print(json.dumps(one), flush=True)
    others = [one for one in rows if one["run"] != arguments.fit]
    if not others:
        return
    said = errors(others)
    chosen = choices(rows)
    print("\n".join([said, *chosen]))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Cost of a run's record of events: the same run with and without it, in pairs, on emulated accelerators.

    python benchmarks/record_in_run.py [--repeats 6] [--scenario uniform] [--steps 30]

The devices use no core, so wall-clock time shows what the record adds to a step, and CPU seconds what it uses in all
processes of a run, from their start. The order within a pair alternates.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from plan_runs import SCENARIOS, Scenario, one_run

# Steps at the start that are not counted.
SKIP = 4


def measured(scenario: Scenario, events: bool, folder: Path) -> tuple[float, float]:
    """Return seconds per step, and CPU seconds of all processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    overrides = (*scenario.overrides, f"async_training.events={str(events).lower()}")
    one_run(replace(scenario, overrides=overrides), folder, folder.parent / "tasks")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = [json.loads(line)["wall_seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (wall[-1] - wall[SKIP - 1]) / (len(wall) - SKIP), cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--scenario", choices=SCENARIOS, default="uniform")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    scenario = replace(SCENARIOS[options.scenario], steps=options.steps)
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeats):
            order = (True, False) if number % 2 else (False, True)
            pair = {events: measured(scenario, events, Path(folder, f"{number}-{events}")) for events in order}
            pairs.append(pair)
            print(f"with {pair[True][0]:.3f} s a step, {pair[True][1]:.1f} CPU s; ", end="")
            print(f"without {pair[False][0]:.3f} s, {pair[False][1]:.1f} CPU s", flush=True)
    for what, n in (("seconds a step", 0), ("CPU seconds", 1)):
        ratios = sorted(pair[True][n] / pair[False][n] for pair in pairs)
        print(f"{what}: with / without {median(ratios):.4f} (median), {mean(ratios):.4f} (mean), ", end="")
        print(f"{ratios[0]:.4f} to {ratios[-1]:.4f}")


if __name__ == "__main__":
    main()

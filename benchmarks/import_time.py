# SPDX-License-Identifier: Apache-2.0
"""Measures the time that the plugin adds to `import verl` in a process that does not use it.

    python benchmarks/import_time.py [--repeats 15]

`import verl` runs in fresh interpreters, alternating between: no plugins (VERL_USE_EXTERNAL_PLUGINS=none), a search for
plugins that names another one, which is verl's own work, and this package's plugin. The results are medians in
milliseconds, and the difference of the last two, which is this package's share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

CODE = "import time; began = time.perf_counter(); import verl; print(time.perf_counter() - began)"
POLICIES = {"none": "none", "search": "another", "plugin": "recipe"}


def seconds(policy: str) -> float:
    kept = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "RECIPE_V1_TRAINERS")}
    environment = {**kept, "VERL_USE_EXTERNAL_PLUGINS": policy}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    seconds("none")  # loads the files into memory
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    for _ in range(repeats):
        for name, policy in POLICIES.items():
            times[name].append(seconds(policy))
    medians = {name: 1000 * statistics.median(values) for name, values in times.items()}
    pairs = [1000 * (plugin - search) for plugin, search in zip(times["plugin"], times["search"], strict=True)]
    result = {f"{name}_ms": round(value, 1) for name, value in medians.items()}
    print(json.dumps({**result, "added_ms": round(statistics.median(pairs), 1), "repeats": repeats}))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Draws the results of `convergence.py`: mean reward by mode, over steps and over time. Needs matplotlib.

python benchmarks/plot_convergence.py runs/convergence.jsonl docs/convergence.svg
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt

WINDOW = 5
CORRECTED = ", corrected"


def smooth(values: list[float]) -> np.ndarray:
    """Return the mean over the last ``WINDOW`` steps."""
    padded = np.concatenate([np.full(WINDOW - 1, values[0]), values])
    return np.convolve(padded, np.ones(WINDOW) / WINDOW, mode="valid")


def main(source: str, target: str) -> None:
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in Path(source).read_text().splitlines():
        row = json.loads(line)
        runs[row["variant"]].append(row)
    figure, (by_step, by_clock) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    colors: dict[str, str] = {}
    for variant, rows in runs.items():
        uncorrected = variant.removesuffix(CORRECTED)
        color = colors.setdefault(uncorrected, f"C{len(colors)}")
        style = "-" if variant == uncorrected else "--"
        curves = np.stack([smooth(row["reward"]) for row in rows])
        steps = np.arange(1, curves.shape[1] + 1)
        clock = np.mean([row["seconds"] for row in rows], axis=0)
        for axes, x in ((by_step, steps), (by_clock, clock)):
            axes.plot(x, curves.mean(axis=0), color=color, linestyle=style, label=variant, linewidth=1.4)
            axes.fill_between(x, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.08, linewidth=0)
    by_step.set(xlabel="step", ylabel=f"mean reward of the batch (over {WINDOW} steps)")
    by_clock.set(xlabel="seconds since the first step, 2 shared cores")
    by_step.legend(fontsize=8)
    for axes in (by_step, by_clock):
        axes.grid(alpha=0.3)
    seeds = sorted({len(rows) for rows in runs.values()})
    by_step.set_title(f"mean and range over {'/'.join(map(str, seeds))} seeds", fontsize=9)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])

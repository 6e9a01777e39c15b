# SPDX-License-Identifier: Apache-2.0
"""Runs a main for a benchmark and collects its metrics by step, with the time at which each was written."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
import stock_overrides as stock
from main_process import run_module, short_run
from surroundings import end_shared_forks, ray_folder, shared_forks, with_helpers

from recipe.async_engine.record.run_record import WITH_ALARMS

__all__ = ["Run", "end_shared_forks", "ray_folder", "run", "shared_forks", "short_run", "stock", "with_helpers"]

RUN_S = 1800
POLL_S = 0.02


@dataclass
class Run:
    """The results of a run: ``steps`` are (seconds since the start of the command, metrics)."""

    returncode: int = -1
    output: str = ""
    seconds: float = 0.0
    steps: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def seconds_per_step(self, skip: int) -> float:
        """Return the mean wall-clock seconds over the steps after the first ``skip``."""
        times = [seconds for seconds, _ in self.steps]
        return (times[-1] - times[skip - 1]) / (len(times) - skip)


def run(
    main: str,
    overrides: Sequence[str],
    metrics: Path,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    forks: Path | None = None,
) -> Run:
    """Run a main to its end.

    Args:
        metrics: the file that it writes a line to after each step.
        forks: passed on to `run_module`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = Run()
    began = time.monotonic()
    ended = threading.Event()

    def watch() -> None:
        position = 0
        while True:
            last = ended.is_set()
            if metrics.exists():
                with metrics.open() as lines:
                    lines.seek(position)
                    for line in iter(lines.readline, ""):
                        if not line.endswith("\n"):
                            break
                        position += len(line.encode())
                        result.steps.append((time.monotonic() - began, json.loads(line)))
            if last:
                return
            time.sleep(POLL_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        finished = run_module(main, overrides, folder, environment or os.environ, RUN_S, forks)
    finally:
        result.seconds = time.monotonic() - began
        ended.set()
        watcher.join()
    result.returncode, result.output = finished.returncode, finished.stdout
    if finished.returncode not in (0, WITH_ALARMS):
        sys.stderr.write(finished.stdout[-6000:])
        raise SystemExit(f"{main} ended with status {finished.returncode}")
    return result

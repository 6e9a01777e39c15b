# SPDX-License-Identifier: Apache-2.0
"""Measures how long the report of a run of 100,000 trajectories takes, and how large it is.

``python benchmarks/large_report.py``.

The record is synthetic, with the amounts of a run of 781 steps of 16 groups of 8 answers on 8 + 8 accelerators.
"""

from __future__ import annotations

import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from recipe.async_engine.core.prompt_manager import Why
from recipe.async_engine.record.event_file import EventFile
from recipe.async_engine.record.events import (
    EMPTY,
    GROUPS,
    SCHEDULER,
    TOKENS,
    TRAINER,
    TRAJECTORIES,
    WEIGHTS,
    Class,
    Event,
)
from recipe.report.page import write
from recipe.report.run import load

STEPS, GROUPS_A_STEP, ANSWERS, ENGINES = 781, 16, 8, 8
PHASES = {"wait": 20, "train": 1, "log_probs": 4, "update": 15, "sync": 1}
STEP_S = sum(PHASES.values())


def events(step: int, rng: random.Random) -> Iterator[Event]:
    """Yield the events of one step."""
    begin = now = 10.0 + step * STEP_S
    for what, seconds in PHASES.items():
        yield Event(TRAINER, what, now, now + seconds)
        now += seconds
    for second in range(STEP_S):
        at = begin + second
        generates = second < 35
        yield Event(SCHEDULER, Why.GENERATING if generates else Why.GATE, at, at + 1)
        shares = {Class.DECODING: 0.6, Class.PREFILL: 0.1, Class.IDLE_PLACES: 0.3} if generates else {EMPTY: 1.0}
        for engine in range(ENGINES):
            for what, share in shares.items():
                yield Event(f"rollout {engine}", what, at, at + 1, share)
    for group in range(step * GROUPS_A_STEP, (step + 1) * GROUPS_A_STEP):
        began = max(0.0, begin - rng.uniform(0, STEP_S))
        for n in range(ANSWERS):
            sampled = began + rng.expovariate(1 / 20)
            tokens = 1 + int(rng.expovariate(1 / 800))
            yield Event(TRAJECTORIES, "generating", began, sampled, 1.0, step, group, n, tokens, "attempt 1")
            yield Event(TRAJECTORIES, "reward", sampled, sampled + rng.uniform(0, 2), 1.0, step, group, n)
        yield Event(GROUPS, "ready", began + 30, now, 1.0, step, group)
        yield Event(GROUPS, "trained", began, now, 1.0, step, group, tokens=800 * ANSWERS)
    for what in ("stage", "swap", "resume"):
        yield Event(WEIGHTS, what, now, now + 0.3, version=step)
    for age in (0, 1):
        yield Event(TOKENS, str(age), now, now, version=step, tokens=rng.randrange(100_000))


def make(folder: Path, steps: int = STEPS) -> None:
    rng = random.Random(0)
    settings = {"max_staleness": 1, "pipeline_depth": 1.0}
    accelerators = {"trainer": 8, "rollout": 1, "log-probs": 1}
    file = EventFile(
        folder, {"accelerators": accelerators, "shared": False, "began": time.time(), "settings": settings}
    )
    with open(folder / "metrics.jsonl", "w") as metrics:
        for step in range(steps):
            file.write(list(events(step, rng)))
            line = {
                "training/global_step": step + 1,
                "wall_seconds": step * STEP_S,
                "critic/rewards/mean": rng.random(),
            }
            metrics.write(json.dumps(line | {"fully_async/sampled_tokens": 90_000}) + "\n")
    file.close()
    print(f"record: {file.path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        run, report = Path(name, "run"), Path(name, "report.html")
        run.mkdir()
        make(run)
        before, cpu_before = time.monotonic(), time.process_time()
        write(load(run), report)
        seconds, cpu = time.monotonic() - before, time.process_time() - cpu_before
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{STEPS * GROUPS_A_STEP * ANSWERS} trajectories: {seconds:.1f} s, {cpu:.1f} s of one core")
        print(f"{report.stat().st_size / 1e6:.1f} MB, {memory:.1f} GiB of memory at most")

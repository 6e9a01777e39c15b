# SPDX-License-Identifier: Apache-2.0
"""Compares published figures with the simulator's: verl's table of its fully_async at 128 H20, Qwen2.5-Math-7B.

    python benchmarks/plan_published.py

The source is verl 0.9.1, docs/advance/fully_async.md: responses of up to 28k, 16 answers per prompt, 512 prompts per
step (synchronous, 128 devices) against 4 batches of 128 (64 devices generate, 64 train). From it come the synchronous
step's shares (log-probs 15%, update 32%) and the update's 113.2 s per 512 prompts on 64 devices. Assumptions: an H20 of
148 TFLOPS and 4 TB/s with the efficiencies of `recipe/plan/device.py`, replicas of one device with 256 places each,
lognormal lengths. Their median is fitted so that the synchronous step generates for the published 177.85 s, separately
for each spread, which the source does not state.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

from documents import table

from benchmarks.emulation.models import MODELS
from recipe.plan.device import H100, DeviceTimes
from recipe.plan.memory.shape import shape_of
from recipe.plan.simulation import Scenario, Simulation
from recipe.plan.times import Times

H20 = replace(H100, name="H20", flops=148e12, memory_bandwidth=4.0e12)
GENERATION_S, LOG_PROBS_S, UPDATE_S = 177.85, 0.15 * 356.3, 113.2
PROMPTS, ANSWERS, MOST, SPREADS = 512, 16, 28_672, (0.8, 1.2)
SYNCHRONOUS_H = 40.8
PUBLISHED = {0.0: 25 + 53 / 60, 0.1: 19 + 59 / 60, 0.3: 17 + 20 / 60, 0.5: 17 + 22 / 60}
"""Hours of 400 steps, by `staleness_threshold`; 0 drains, the others interrupt answers."""
NO_BOUND = 16
"""More versions than a run of `VERSIONS` has."""
VERSIONS, SKIP = 10, 3


def times(median: float, spread: float, update_s: float, log_probs_s: float) -> Times:
    shape = shape_of(MODELS["qwen2.5-7b"])
    assert shape is not None
    device, draw = DeviceTimes(H20, shape), random.Random(0)
    groups = tuple(
        tuple(max(1, min(MOST, round(median * draw.lognormvariate(0, spread)))) for _ in range(ANSWERS))
        for _ in range(2_048)
    )
    return Times(
        groups=groups,
        step_s=device.decode_step_s,
        read_s=device.prefill_s,
        update_s=lambda lengths, ranks: update_s,
        log_probs_s=lambda lengths, ranks: log_probs_s,
        prompt=200,
        stage_s=device.transfer_s(),
        swap_s=device.load_s(),
    )


def synchronous(median: float, spread: float) -> float:
    """Return the seconds of a step's generation."""
    scenario = Scenario(PROMPTS, ANSWERS, 128, 256, 256, 0, 0, shared=True, steps=4)
    found = Simulation(scenario, times(median, spread, UPDATE_S, LOG_PROBS_S)).run().step_s(1)
    return found - UPDATE_S - LOG_PROBS_S


def median_for(spread: float) -> float:
    low, high = 200.0, 8_000.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if synchronous(middle, spread) < GENERATION_S else (low, middle)
    return (low + high) / 2


def asynchronous(threshold: float, bound: int, median: float, spread: float) -> float:
    """Return the seconds for 512 prompts."""
    scenario = Scenario(
        PROMPTS // 4,
        ANSWERS,
        64,
        256,
        256,
        max_staleness=bound if threshold else 0,
        pipeline_depth=threshold,
        batches_per_version=4,
        at_swap="interrupt" if threshold else "drain",
        steps=4 * VERSIONS,
    )
    return 4 * Simulation(scenario, times(median, spread, UPDATE_S / 4, 0.0)).run().step_s(4 * SKIP)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    medians = {spread: median_for(spread) for spread in SPREADS}
    cases = [(NO_BOUND, median, spread) for spread, median in medians.items()]
    cases += [(bound, medians[SPREADS[0]], SPREADS[0]) for bound in (1, 2, 3)]
    fits = [
        f"spread {spread}, median {median:.0f}: {'no bound, as there' if bound == NO_BOUND else f'bound {bound}'}"
        for bound, median, spread in cases
    ]
    lines = []
    for threshold, hours in PUBLISHED.items():
        said = [f"{(GENERATION_S + UPDATE_S + LOG_PROBS_S) / asynchronous(threshold, *case):.2f}" for case in cases]
        lines.append([f"{threshold:g}", f"{SYNCHRONOUS_H / hours:.2f}", *said])
    found = table(["staleness_threshold", "published, times the synchronous rate", *fits], lines)
    print(found)


if __name__ == "__main__":
    main()

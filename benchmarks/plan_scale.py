# SPDX-License-Identifier: Apache-2.0
"""Measures the simulator at 1,024 devices and 65,536 trajectories in flight, and the cost of the core's decisions in
it.

    python benchmarks/plan_scale.py [--hours 1] [--groups 10000 100000 1000000]

896 replicas of one H100 generate for a trainer of 128, with a 7B model, lognormal answers of 4,000 tokens at the median
and 16,000 at most, 8 per prompt, and 1,024 prompts per step. The results are the CPU seconds for the virtual ones, and
the part of them in ledger, gate and prompt manager. Then, for each number of groups, the microseconds of decisions per
group (issue, 8 slots given, 8 freed, complete, taken, trained, versions sealed and announced) over the last tenth of a
run of that many groups.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from benchmarks.emulation.models import MODELS
from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import PromptRef
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.prompt_manager import PromptManager
from recipe.plan.device import H100, DeviceTimes
from recipe.plan.memory.shape import shape_of
from recipe.plan.simulation import Scenario, Simulation
from recipe.plan.times import estimated

BATCH, ANSWERS = 64, 8


def hours(wanted: float) -> dict[str, float]:
    shape = shape_of(MODELS["qwen2.5-7b"])
    assert shape is not None
    draw = random.Random(0)
    lengths = [[min(16_000, round(4_000 * draw.lognormvariate(0, 0.6))) for _ in range(8)] for _ in range(2_000)]
    times = estimated(DeviceTimes(H100, shape), lambda ranks: DeviceTimes(H100, shape, ranks), lengths, 512)
    scenario = Scenario(1024, 8, 896, 74, 74, max_staleness=8, pipeline_depth=8, steps=10_000, trainer_ranks=128)
    run = Simulation(scenario, times)
    most = 0

    def over() -> bool:
        nonlocal most
        most = max(most, run.manager.running)
        return run.clock.now >= 3600 * wanted

    began = time.process_time()
    run.begin()
    run.clock.run(over)
    took = time.process_time() - began
    return {
        "virtual_s": round(run.clock.now),
        "cpu_s": round(took, 1),
        "most_in_flight": most,
        "groups_trained": run.ledger.counts().trained,
        "decisions_s": round(run.decisions_s, 1),
        "decisions_share_of_virtual": round(run.decisions_s / run.clock.now, 5),
    }


def decisions(groups: int) -> float:
    """Return microseconds per group over the last tenth of the groups."""
    ledger = SampleLedger(GateSettings(BATCH, 1, 4, 4), target_groups=groups)
    manager = PromptManager(ledger, ANSWERS, 4 * BATCH * ANSWERS)
    manager.open()
    draw = random.Random(0)
    issued = trained = 0
    running: dict[int, list] = {}

    def issue() -> bool:
        nonlocal issued
        manager.issue(PromptRef(issued, 0, str(issued)))
        issued += 1
        return True

    began = at = 0.0
    while trained + BATCH <= groups:
        if not at and trained >= 0.9 * groups:
            began, at = time.process_time(), float(trained)
        for trajectory in manager.picks(issue):
            running.setdefault(trajectory.group_id, []).append(trajectory)
        # A random one of the oldest groups ends next.
        group_id = list(running)[draw.randrange(min(4, len(running)))]
        for trajectory in running.pop(group_id):
            manager.sampled(trajectory)
        group = ledger.find(group_id)
        assert group is not None
        manager.complete(group_id, group.start)
        if ledger.may_take():
            ledger.take()
            ledger.mark_trained()
            ledger.seal()
            ledger.announce()
            trained += BATCH
    return 1e6 * (time.process_time() - began) / (trained - at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--groups", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    if arguments.hours:
        print(json.dumps(hours(arguments.hours)), flush=True)
    for groups in arguments.groups:
        print(json.dumps({"groups": groups, "us_a_group": round(decisions(groups), 1)}), flush=True)


if __name__ == "__main__":
    main()

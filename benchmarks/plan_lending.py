# SPDX-License-Identifier: Apache-2.0
"""Simulates lending the trainer's accelerators to generation, beside every fixed split and stock's rule.

    python benchmarks/plan_lending.py [--tasks uniform growing] [--bounds 1 4 8] [--batches 1 4] [--wide]

H100s, a 7B model on replicas of 2, batches of 16 prompts with 4 answers, 32 slots a replica, as in the race: 8 devices,
and with `--wide` 64 and 1,024, with batches and splits that grow alike. A cell has trained tokens a device-second:
of the best fixed split, then the ratios to it of stock's rule, of ``elastic`` (half of the devices train) and of
``shared`` (all train), each with the number of switches, the mean staleness, and the useful share of all accelerators'
time over that of the time outside switches. A switch takes `ASSUMED_SWITCH`; nothing here was measured.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from documents import table

from benchmarks.emulation.models import MODELS
from recipe.async_engine.core.lending import Demand, LendingPolicy, Places
from recipe.plan.device import H100, DeviceTimes
from recipe.plan.lending import LendingSimulation
from recipe.plan.memory.shape import shape_of
from recipe.plan.simulation import Result, Scenario, Simulation
from recipe.plan.times import ASSUMED_SWITCH, Times, estimated

SIZE, BATCH, ANSWERS, SLOTS, PROMPT = 2, 16, 4, 32, 512
STEPS, SKIP = 40, 8
SHORT, LONG = 1_536, 30_720
REWARD_S = 12.5


def _uniform(draw: random.Random, progress: float) -> int:
    return SHORT


def _long_tail(draw: random.Random, progress: float) -> int:
    return LONG if draw.random() < 0.05 else SHORT


def _growing(draw: random.Random, progress: float) -> int:
    """Lognormal lengths whose median grows threefold during a run."""
    return min(LONG, round((1 + 2 * min(1.0, progress)) * SHORT * draw.lognormvariate(0, 0.6)))


TASKS: dict[str, Callable[[random.Random, float], int]] = {
    "uniform": _uniform,
    "long_tail": _long_tail,
    "slow_rewards": _uniform,
    "growing": _growing,
}


class StockPolicy(LendingPolicy):
    """The rule of verl's dynamic_schedule in a simulation of ours.

    It lends where the expected gain is above the cost of a switch, and calls back when the groups of all batches of the
    next version are ready (verl 0.9.1, experimental/fully_async_policy/dynamic_schedule/default_policy.py, without the
    ratio that it adapts by 0.02 a step).
    """

    def __init__(self, batches: int) -> None:
        super().__init__()
        self._batches = batches

    def lends(self, places: Places, demand: Demand) -> bool:
        """Return whether the expected gain is above the mean cost of a switch."""
        if demand.may_take or places.hybrid == 0:
            return False
        if self.group_place_s.value is None or places.standalone == 0:
            return True
        wanted = self._batches * demand.batch_groups - demand.ready
        alone, every = self._in_groups(places.standalone), self._in_groups(places.standalone + places.hybrid)
        return wanted / alone - wanted / every > (self.wake_s.value or 0.0) + (self.sleep_s.value or 0.0)

    def calls_back(self, places: Places, demand: Demand) -> bool:
        """Return whether the share is ready, or nothing is left to generate."""
        over = places.waiting == 0 and places.hybrid_taken == 0
        enough = demand.ready >= min(self._batches * demand.batch_groups, demand.most_live)
        return demand.may_take and (enough or over)


@dataclass(frozen=True)
class Cell:
    """One setting of the table."""

    task: str
    devices: int
    bound: int
    batches: int

    @property
    def scenario(self) -> Scenario:
        """The scenario with half of the devices for each side."""
        scale = self.devices // 8
        return Scenario(
            BATCH * scale,
            ANSWERS,
            self.devices // 2 // SIZE,
            SLOTS,
            SLOTS,
            self.bound,
            float(self.bound),
            batches_per_version=self.batches,
            steps=STEPS * self.batches,
            trainer_ranks=self.devices // 2,
            replica_size=SIZE,
        )

    def times(self) -> Times:
        """How long the parts take, with the lengths of the task."""
        shape = shape_of(MODELS["qwen2.5-7b"])
        assert shape is not None
        draw, wanted = random.Random(1), self.scenario.steps * self.scenario.batch_groups
        length = TASKS[self.task]
        groups = [[length(draw, n / wanted) for _ in range(ANSWERS)] for n in range(2 * wanted)]

        def trainer(ranks: float) -> DeviceTimes:
            return DeviceTimes(H100, shape, round(ranks))

        return replace(
            estimated(DeviceTimes(H100, shape, SIZE), trainer, groups, PROMPT),
            log_probs_s=lambda lengths, ranks: trainer(ranks).log_probs_s([PROMPT + length for length in lengths]),
            rewards=(REWARD_S,) if self.task == "slow_rewards" else (0.0,),
        )

    def rate(self, result: Result) -> float:
        return result.tokens_per_s(SKIP * self.batches) / self.devices

    def best_fixed(self, times: Times) -> tuple[float, str]:
        """The best of all splits, with how many devices train."""
        found = []
        for eighth in range(1, 8):
            ranks = self.devices * eighth // 8
            if (self.devices - ranks) % SIZE:
                continue
            scenario = replace(self.scenario, trainer_ranks=ranks, replicas=(self.devices - ranks) // SIZE)
            result = Simulation(scenario, times, seed=None).run()
            found.append((self.rate(result), f"{ranks} of {self.devices}, {result.staleness:.1f}"))
        return max(found)

    def lent(self, times: Times, ranks: int, policy: LendingPolicy) -> tuple[float, str]:
        scenario = replace(self.scenario, trainer_ranks=ranks, replicas=(self.devices - ranks) // SIZE)
        run = LendingSimulation(scenario, times, policy, seed=None)
        result = run.run()
        switching = (
            run.switches * (ASSUMED_SWITCH.wake_s + ASSUMED_SWITCH.sleep_s) * ranks / (self.devices * run.clock.now)
        )
        return self.rate(result), (
            f"{run.switches}, {result.staleness:.1f}, {run.useful_share(result) / (1 - switching):.2f}"
        )


def cells(tasks: Sequence[str], bounds: Sequence[int], batches: Sequence[int], sizes: Sequence[int]) -> list[Cell]:
    return [Cell(task, size, bound, k) for task in tasks for size in sizes for bound in bounds for k in batches]


def row(cell: Cell) -> list[str]:
    times = cell.times()
    best, split = cell.best_fixed(times)
    half = cell.devices // 2
    sides = [
        cell.lent(times, half, StockPolicy(cell.batches)),
        cell.lent(times, half, LendingPolicy()),
        cell.lent(times, cell.devices, LendingPolicy()),
    ]
    name = f"`{cell.task}`, {cell.devices}, bound {cell.bound}, k {cell.batches}"
    return [name, f"{best:.0f} ({split})", *(f"{rate / best:.2f} ({said})" for rate, said in sides)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--bounds", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--wide", action="store_true")
    options = parser.parse_args()
    sizes = [8, 64, 1024] if options.wide else [8]
    rows = [row(cell) for cell in cells(options.tasks, options.bounds, options.batches, sizes)]
    print(table(["task, devices, bound, k", "best fixed split", "stock's rule", "elastic", "shared"], rows))


if __name__ == "__main__":
    main()

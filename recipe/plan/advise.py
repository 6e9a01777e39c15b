# SPDX-License-Identifier: Apache-2.0
"""Finds the best split of accelerators between trainer and rollout, and the best staleness bound, by simulation.

Contract: each candidate is simulated once with each seed. Candidates are ordered by what the goal asks for: throughput,
or throughput per accelerator, as the median over the seeds. For each candidate but the best, the printed table names
the class of lost accelerator time (such as waiting for a batch) whose share grows most from the best candidate to this
one. Shown by tests/plan/test_advise.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from recipe.async_engine.config.sections import ELASTIC, SEPARATE
from recipe.async_engine.record.events import Class
from recipe.plan.lending import simulated
from recipe.plan.simulation import Result, Scenario
from recipe.plan.times import CannotPlan, Times
from recipe.report.account import KINDS, Kind

SKIP = 4
BOUNDS = (0, 1, 2, 4)
PER_NODE = 8
MOST = 16_384
"""Largest number of accelerators to plan for; simulating a candidate of that size takes minutes."""


def most_staleness(goal: str) -> float | None:
    """Return N if the goal is ``staleness<=N``, and None if it is ``throughput`` or ``cost``."""
    if goal in ("throughput", "cost"):
        return None
    name, _, number = goal.partition("<=")
    with suppress(ValueError):
        if name == "staleness":
            return float(number)
    raise CannotPlan(f"--goal {goal!r} is not known: give throughput, cost, or staleness<=N with a number N")


@dataclass(frozen=True)
class Advice:
    """A candidate: a split of accelerators with a staleness bound (`scenario`), and its simulated results.

    Attributes:
        tokens_per_s: trained tokens per second, the median over the seeds.
        lowest, highest: smallest and largest number of trained tokens per second over the seeds.
        staleness: mean staleness of the trained groups in versions, the median over the seeds.
        shares: share of each class of accelerator time, such as waiting for a batch, as simulated with the first seed.
        also: further Hydra overrides, appended to `overrides`.
    """

    scenario: Scenario
    accelerators: int
    tokens_per_s: float
    lowest: float
    highest: float
    staleness: float
    shares: Mapping[str, float]
    per_node: int = PER_NODE
    also: str = ""

    @property
    def placement(self) -> str:
        return ELASTIC if self.scenario.lends else SEPARATE

    @property
    def overrides(self) -> str:
        """Return the candidate's settings as Hydra overrides, for a command line."""
        scenario = self.scenario
        rollout = scenario.replicas * scenario.replica_size
        trainer_part, rollout_part = parts_of_nodes(scenario.trainer_ranks, rollout, self.per_node)
        return (
            f"trainer.n_gpus_per_node={trainer_part} trainer.nnodes={scenario.trainer_ranks // trainer_part} "
            f"rollout.n_gpus_per_node={rollout_part} rollout.nnodes={rollout // rollout_part} "
            f"async_training.placement={self.placement} async_training.max_staleness={scenario.max_staleness} "
            f"async_training.staleness_threshold={scenario.pipeline_depth:g} "
            f"async_training.trigger_parameter_sync_step={scenario.batches_per_version}{self.also}"
        )

    def row(self, best: Advice) -> dict[str, Any]:
        """Return this candidate's row for the table of all candidates.

        The row also says why the candidate is worse than ``best``, the best candidate.
        """
        return {
            "trainer_accelerators": self.scenario.trainer_ranks,
            "rollout_accelerators": self.scenario.replicas * self.scenario.replica_size,
            "placement": self.placement,
            "max_staleness": self.scenario.max_staleness,
            "batches_per_version": self.scenario.batches_per_version,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "range": [round(self.lowest, 2), round(self.highest, 2)],
            "staleness": round(self.staleness, 3),
            "why_worse": "" if self is best else self.why_worse(best),
            "overrides": self.overrides,
        }

    def why_worse(self, best: Advice) -> str:
        """Return, as text, the class of lost time whose share grows most from ``best`` to this candidate, and by how
        much it grows.
        """
        lost = {name: share - best.shares.get(name, 0.0) for name, share in self.shares.items()}
        waits = {name: more for name, more in lost.items() if KINDS[Class(name)] not in (Kind.USEFUL, Kind.START_UP)}
        name = max(waits, key=lambda name: waits[name], default="")
        return f"{name} +{100 * waits[name]:.0f}%" if name and waits[name] > 0 else "as much idle"


def candidates(base: Scenario, accelerators: int, lends: bool) -> list[Scenario]:
    """Return the scenarios to compare.

    There is one for each combination of a split of the accelerators (1/8 to 7/8 for the trainer), a staleness bound
    (one of `BOUNDS`) and a number of batches per version (``base.batches_per_version`` or 1). The trainer's part is
    rounded down to a divisor of the number of trajectories in a batch, because the configuration rules require that.
    If ``lends`` is true and the trainer's part is a multiple of a replica's size, a second scenario of the combination
    lends the trainer's accelerators to replicas.
    """
    size, rows = base.replica_size, base.batch_groups * base.answers
    if not 1 + size <= accelerators <= MOST:
        raise CannotPlan(
            f"--accelerators {accelerators}: it must be at least {1 + size}, 1 to train and {size} for a replica, and "
            f"at most {MOST}"
        )
    found = []
    for trainer in sorted({_ranks(rows, accelerators * eighth // 8, accelerators - size) for eighth in range(1, 8)}):
        replicas = (accelerators - trainer) // size
        for bound in BOUNDS:
            for batches in sorted({base.batches_per_version, 1}):
                scenario = replace(base, trainer_ranks=trainer, replicas=replicas, batches_per_version=batches)
                for lent in (False, True) if lends and trainer % size == 0 else (False,):
                    found.append(replace(scenario, max_staleness=bound, pipeline_depth=float(bound), lends=lent))
    return found


def _ranks(rows: int, wanted: int, most: int) -> int:
    """Return the largest divisor of ``rows`` that is at most ``wanted`` and at most ``most``."""
    return next(ranks for ranks in range(max(1, min(wanted, most)), 0, -1) if rows % ranks == 0)


def parts_of_nodes(trainer: int, rollout: int, per_node: int) -> tuple[int, int]:
    """Return how many accelerators the trainer, and how many the rollout, uses on each of its nodes.

    The numbers are such that as few nodes as possible are needed.

    Args:
        trainer, rollout: numbers of accelerators that trainer and rollout use in total.
        per_node: number of accelerators of a node.
    """
    nodes = -(-(trainer + rollout) // per_node)
    pairs = [(a, b) for a in _divisors(trainer, per_node) for b in _divisors(rollout, per_node)]
    return max((pair for pair in pairs if _fit((trainer, rollout), pair, nodes, per_node)), key=sum)


def _divisors(count: int, most: int) -> list[int]:
    return [part for part in range(1, most + 1) if count % part == 0]


def _fit(counts: tuple[int, int], parts: tuple[int, int], nodes: int, per_node: int) -> bool:
    """Return whether trainer and rollout together fit on ``nodes`` nodes of ``per_node`` accelerators.

    Args:
        counts: numbers of accelerators that trainer and rollout use in total.
        parts: numbers of accelerators that they use on each of their nodes.
    """
    (small, small_count), (large, large_count) = sorted(zip(parts, counts, strict=True))
    full, rest = divmod(large_count // large, per_node // large)
    empty = nodes - full - (rest > 0)
    room = full * (per_node % large // small) + empty * (per_node // small)
    room += (per_node - rest * large) // small if rest else 0
    return empty >= 0 and room >= small_count // small


def advise(
    base: Scenario, times: Times, accelerators: int, goal: str, seeds: Iterable[int], per_node: int = PER_NODE
) -> list[Advice]:
    """Simulate all candidates, and return those that meet the goal, best first."""
    seeds, limit = list(seeds), most_staleness(goal)
    found = [
        _judge(scenario, [simulated(scenario, times, seed).run() for seed in seeds], per_node)
        for scenario in candidates(base, accelerators, times.switch is not None)
    ]
    fit = [advice for advice in found if limit is None or advice.staleness <= limit]

    def worth(advice: Advice) -> float:
        return advice.tokens_per_s / (advice.accelerators if goal == "cost" else 1)

    return sorted(fit, key=worth, reverse=True)


def _judge(scenario: Scenario, results: list[Result], per_node: int) -> Advice:
    rates = [result.tokens_per_s(SKIP) for result in results]
    totals = results[0].account.total
    whole = sum(totals.values())
    return Advice(
        scenario,
        scenario.trainer_ranks + scenario.replicas * scenario.replica_size,
        statistics.median(rates),
        min(rates),
        max(rates),
        statistics.median(result.staleness for result in results),
        {name: seconds / whole for name, seconds in totals.items()},
        per_node,
    )

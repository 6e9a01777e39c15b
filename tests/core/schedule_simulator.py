# SPDX-License-Identifier: Apache-2.0
"""Random schedules of generation and training, run against a sample ledger and judged independently of it.

A schedule draws its settings and then, one at a time, random events: groups are issued or end (ready, filtered, failed,
restarted; some are stragglers that end only when nothing else can happen), batches are taken and trained, versions are
sealed and announced, at once or late, and the job is stopped and resumed from a snapshot. The simulator keeps its own
versions, starts and counts, and raises `Violation` with the kind of promise that was broken:

- `stale`: a batch holds a group that is more than S versions old, or that is not ready
- `depth`: more groups are live than the soft depth admits
- `batches`: a version has other than k batches, or a batch other than b groups
- `early`: a group starts at a version that is not announced
- `deadlock`: nothing can happen any more, although prompts for another batch are left
- `dropped`: with `wait`, a group neither trained, nor ended by the schedule itself, nor live; with `drop`, a group that
  kept no batch from being taken
- `identity`: the ledger's counts differ from the simulator's
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor
from typing import Any

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import Group, PromptRef
from recipe.async_engine.core.ledger import SampleLedger

EVENT_LIMIT = 20_000


class Violation(AssertionError):
    """A schedule broke a promise."""

    def __init__(self, kind: str, detail: object) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclass(frozen=True)
class Plan:
    """The parameters of a schedule."""

    settings: GateSettings
    target_groups: int
    prompts: int
    issue_weight: float
    end_weight: float
    train_weight: float
    straggler_share: float
    filter_share: float
    fail_share: float
    restart_share: float
    rise_share: float
    resume_share: float
    announce_weight: float
    lag: int
    """Largest number of sealed versions that are not announced; 0 announces each as soon as it is sealed."""

    @classmethod
    def draw(cls, rng: random.Random) -> Plan:
        k, b, bound = rng.randint(1, 3), rng.randint(1, 4), rng.choice((0, 0, 1, 1, 2, 3, 4))
        depth = rng.choice((bound, bound, 0, Fraction(rng.randint(0, 7 * bound), 7), round(rng.random() * bound, 1)))
        target = b * k * rng.randint(1, bound + 3)
        return cls(
            settings=GateSettings(b, k, bound, depth),
            target_groups=target,
            prompts=max(1, target + rng.randint(-b, 2 * b)),
            issue_weight=rng.choice((0.2, 1.0, 5.0)),
            end_weight=rng.choice((0.2, 1.0, 5.0)),
            train_weight=rng.choice((0.2, 1.0, 5.0)),
            straggler_share=rng.choice((0.0, 0.1, 0.4)),
            filter_share=rng.choice((0.0, 0.1, 0.3)),
            fail_share=rng.choice((0.0, 0.05)),
            restart_share=rng.choice((0.0, 0.1, 0.4)),
            rise_share=rng.choice((0.0, 0.3, 0.8)),
            resume_share=rng.choice((0.0, 0.0, 0.01)),
            announce_weight=rng.choice((0.05, 0.3, 1.0, 5.0)),
            lag=rng.choice((0, 1, 1, 1, 2, bound + 1)),
        )


@dataclass
class Tally:
    """Counts of the events in one schedule, or in many."""

    trained: int = 0
    filtered: int = 0
    failed: int = 0
    restarted: int = 0
    resumed: int = 0
    at_bound: int = 0
    late: int = 0
    """Groups trained by a version that was not announced yet."""
    by_plan: dict[tuple[int, int], int] = field(default_factory=dict)

    def merge(self, other: Tally) -> None:
        for name in ("trained", "filtered", "failed", "restarted", "resumed", "at_bound", "late"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, count in other.by_plan.items():
            self.by_plan[key] = self.by_plan.get(key, 0) + count


class Schedule:
    """One random schedule; `run` returns its tally or raises `Violation`, or any error of the ledger."""

    def __init__(self, seed: int, ledger_type: type[SampleLedger] = SampleLedger) -> None:
        self.rng = random.Random(seed)
        self.plan = Plan.draw(self.rng)
        self.ledger_type = ledger_type
        self.ledger = ledger_type(self.plan.settings, target_groups=self.plan.target_groups)
        settings = self.plan.settings
        self.b, self.k, self.bound = settings.batch_groups, settings.batches_per_version, settings.max_staleness
        self.depth_groups = floor(settings.pipeline_depth * self.k * self.b)
        self.version = self.announced = self.taken = self.issued = self.events = 0
        self.running: list[int] = []
        self.stragglers: list[int] = []
        self.ready: set[int] = set()
        self.leased: list[int] = []
        self.starts: dict[int, int] = {}
        self.tally = Tally(by_plan={(self.k, self.bound): 1})

    def run(self) -> Tally:
        while self.step():
            self.events += 1
            if self.events > EVENT_LIMIT:
                raise Violation("deadlock", f"no end after {EVENT_LIMIT} events")
        self.check_end()
        return self.tally

    def step(self) -> bool:
        """Perform one event; return False if none can happen."""
        plan, events = self.plan, []
        if self.issued < plan.prompts and self.ledger.can_issue():
            events.append((plan.issue_weight, self.issue))
        if self.running:
            events.append((plan.end_weight, self.end_ordinary))
        trainer = self.trainer_event()
        if trainer is not None:
            events.append((plan.train_weight, trainer))
        if self.announced < self.version:
            events.append((plan.announce_weight, self.announce))
        if plan.resume_share and self.rng.random() < plan.resume_share:
            self.resume()
        elif events:
            self.rng.choices([event for _, event in events], [weight for weight, _ in events])[0]()
        elif self.stragglers:
            self.end_straggler()
        else:
            return False
        return True

    def trainer_event(self) -> Any:
        if self.leased:
            return self.train
        if self.taken == self.k:
            if self.ledger.next_batch() is not None:
                raise Violation("batches", f"one more than {self.k} in version {self.version}")
            at_once = self.plan.lag == 0
            return self.publish if at_once else self.seal if self.version - self.announced < self.plan.lag else None
        if len(self.ready) >= self.b and self.ledger.next_batch() is not None:
            return self.take
        return None

    def issue(self) -> None:
        group_id = self.issue_by(self.ledger.issue)
        straggles = self.rng.random() < self.plan.straggler_share
        (self.stragglers if straggles else self.running).append(group_id)

    def issue_by(self, issue: Callable[[PromptRef], Group]) -> int:
        """Have ``issue`` issue a group for the next prompt, and return its id."""
        limit = self.depth_groups + (self.k - self.taken) * self.b
        live = len(self.running) + len(self.stragglers) + len(self.ready)
        if live + 1 > limit:
            raise Violation("depth", f"{live + 1} live groups, {limit} admitted")
        group = issue(PromptRef(index=self.issued, epoch=0, uid=str(self.issued)))
        self.issued += 1
        if group.start != self.announced:
            raise Violation("early", f"{group} starts, version {self.announced} is announced")
        self.starts[group.id] = self.announced
        return group.id

    def end_ordinary(self) -> None:
        self.end(self.running.pop(self.rng.randrange(len(self.running))))

    def end_straggler(self) -> None:
        self.end(self.stragglers.pop(self.rng.randrange(len(self.stragglers))))

    def end(self, group_id: int) -> None:
        plan, draw = self.plan, self.rng.random()
        if draw < plan.filter_share:
            self.ledger.filter(group_id, "constant_reward")
            self.tally.filtered += 1
        elif draw < plan.filter_share + plan.fail_share:
            self.ledger.fail(group_id, "reward_error")
            self.tally.failed += 1
        elif draw < plan.filter_share + plan.fail_share + plan.restart_share:
            if self.ledger.restart(group_id).start != self.announced:
                raise Violation("early", f"group {group_id} starts again, version {self.announced} is announced")
            self.starts[group_id] = self.announced
            self.running.append(group_id)
            self.tally.restarted += 1
        else:
            start = self.starts[group_id]
            if self.rng.random() < self.plan.rise_share:
                start = self.rng.randint(start, self.announced)
            self.ledger.mark_ready(group_id, start)
            self.starts[group_id] = start
            self.ready.add(group_id)

    def take(self) -> None:
        batch = self.ledger.next_batch()
        assert batch is not None
        ids = [group.id for group in batch]
        if len(set(ids)) != self.b or self.taken >= self.k:
            raise Violation("batches", f"{ids} as batch {self.taken + 1} of {self.k}")
        for group_id in ids:
            if group_id not in self.ready or self.version - self.starts[group_id] > self.bound:
                raise Violation("stale", f"group {group_id} of {self.starts[group_id]} at {self.version}")
            self.tally.at_bound += self.version - self.starts[group_id] == self.bound > 0
        if [group.id for group in self.ledger.take()] != ids:
            raise Violation("batches", "the batch taken is not the batch announced")
        self.leased = ids
        self.ready.difference_update(ids)
        self.taken += 1

    def train(self) -> None:
        staleness = self.ledger.mark_trained()
        if staleness.sum != sum(self.version - self.starts[group_id] for group_id in self.leased):
            raise Violation("identity", f"staleness {staleness} of {self.leased}")
        self.tally.trained += len(self.leased)
        self.tally.late += len(self.leased) * (self.announced < self.version)
        self.leased = []
        self.check_counts()

    def publish(self) -> None:
        self.seal()
        self.announce()

    def seal(self) -> None:
        if self.ledger.seal() != self.version + 1:
            raise Violation("batches", f"version {self.ledger.version} was sealed after {self.version}")
        self.version += 1
        self.taken = 0

    def announce(self) -> None:
        if self.ledger.announce() != self.announced + 1:
            raise Violation("early", f"version {self.ledger.announced} was announced after {self.announced}")
        self.announced += 1

    def resume(self) -> None:
        """Stop the job and resume it from a checkpoint made now."""
        snapshot = json.loads(json.dumps(self.ledger.snapshot()))
        self.ledger = self.ledger_type.restore(snapshot, self.plan.settings, target_groups=self.plan.target_groups)
        if self.leased:
            self.ready.update(self.leased)
            self.leased = []
            self.taken -= 1
        # A resumed job publishes the version from which it trains before it generates.
        self.announced = self.version
        self.tally.resumed += 1
        self.check_counts()

    def check_counts(self) -> None:
        counts, tally = self.ledger.counts(), self.tally
        seen = (counts.issued, counts.trained, counts.filtered, counts.failed, counts.running, counts.ready)
        own_running = len(self.running) + len(self.stragglers)
        own = (self.issued, tally.trained, tally.filtered, tally.failed, own_running, len(self.ready))
        if seen != own or counts.issued != counts.trained + counts.filtered + counts.failed + counts.live:
            raise Violation("identity", f"{counts}, expected {own}")

    def check_end(self) -> None:
        """Check at the end that the target is reached, or that too few prompts are left for a batch."""
        self.check_counts()
        tally, plan = self.tally, self.plan
        left = len(self.ready) + plan.prompts - self.issued
        if tally.trained < plan.target_groups and left >= self.b:
            raise Violation("deadlock", f"{tally.trained} of {plan.target_groups} trained, {left} groups left")
        if self.ledger.batch_possible(plan.prompts - self.issued) and tally.trained < plan.target_groups:
            raise Violation("deadlock", "the ledger promises a batch that cannot form")
        ended = tally.trained + tally.filtered + tally.failed + len(self.ready)
        if ended != self.issued:
            raise Violation("dropped", f"{self.issued} issued, {ended} accounted for")


def run_schedules(seeds: range, ledger_type: type[SampleLedger] = SampleLedger) -> Tally:
    """Run the schedules of these seeds; raise at the first that breaks a promise."""
    total = Tally()
    for seed in seeds:
        total.merge(Schedule(seed, ledger_type).run())
    return total

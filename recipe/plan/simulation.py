# SPDX-License-Identifier: Apache-2.0
"""Simulates an asynchronous RL run on a virtual clock.

Contract: the real state machines (`recipe.async_engine.core`: ledger, staleness gate and prompt manager) decide what
may start, what generates next and what is trained, so the staleness bound holds as in a real run. Engines, trainer and
rewards are modelled by durations. The simulation records the same events as a real run, from which the same time
account is computed: the accelerator time in each class, such as decoding or waiting. The same scenario and seed give
the same result. Filtered groups, failures, validation and tools are not simulated. Shown by
tests/plan/test_simulation.py.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import PromptRef
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import OldestReady, Turns, WholeBatches
from recipe.async_engine.core.prompt_manager import PromptManager, Trajectory, Why
from recipe.async_engine.record.activity import Work
from recipe.async_engine.record.events import ROLLOUT, SCHEDULER, TRAINER, Class, Devices, Event, Lane, TokenBooks
from recipe.async_engine.record.timeline import Timeline
from recipe.plan.engine import Clock, Engine, Process, Request
from recipe.plan.times import CannotPlan, Times
from recipe.report.account import Account, close

Decided = TypeVar("Decided")


@dataclass(frozen=True)
class Scenario:
    """The settings of a run to be simulated.

    Attributes:
        slots: largest number of trajectories that one replica has at the same time, decoding or queued.
        places: largest number of trajectories that one replica decodes at the same time.
        shared: whether training and generation take turns on the same accelerators.
        lends: whether hybrid replicas generate on the trainer's accelerators while it waits (`recipe.plan.lending`);
            `replicas` counts only the others.
        at_swap: what happens to unfinished answers at a weight sync: they end first ("drain"), are interrupted
            ("interrupt"), or stay in the engine ("keep").
        beside: whether training continues while weights are sent to the replicas.
        replica_size: number of accelerators of a rollout replica.
        reward_processes: number of processes that compute rewards; 0 means unlimited.
    """

    batch_groups: int
    answers: int
    replicas: int
    slots: int
    places: int
    max_staleness: int = 1
    pipeline_depth: float = 1.0
    batches_per_version: int = 1
    whole_batches: bool = False
    shared: bool = False
    lends: bool = False
    at_swap: str = "interrupt"
    beside: bool = True
    steps: int = 20
    trainer_ranks: int = 1
    replica_size: int = 1
    reward_processes: int = 0


@dataclass(frozen=True)
class Result:
    """The figures of a simulated run.

    Attributes:
        ended: time at which each step ended, in virtual seconds.
        staleness: mean staleness of the trained groups, in versions.
        token_ages: number of trained tokens by age in versions.
        account: accelerator time by class (`Class`).
        decisions_s: CPU seconds that the state machines needed for their decisions (measured, not simulated).
    """

    ended: list[float]
    tokens: list[int]
    staleness: float
    staleness_max: int
    token_ages: dict[int, int]
    account: Account
    decisions_s: float
    trained_groups: int

    def step_s(self, skip: int) -> float:
        """Return the mean seconds per step after the first ``skip`` steps."""
        return (self.ended[-1] - self.ended[skip - 1]) / (len(self.ended) - skip)

    def tokens_per_s(self, skip: int) -> float:
        return sum(self.tokens[skip:]) / (self.ended[-1] - self.ended[skip - 1])


@dataclass
class _Group:
    """A prompt group in progress.

    Attributes:
        left: number of answers without a reward.
        lengths: final number of tokens of each answer.
        versions: number of tokens of the rewarded answers, by the policy version that sampled them.
        answers: number of tokens of each rewarded answer.
    """

    left: int
    lengths: list[int]
    oldest: int | None = None
    versions: dict[int, int] = field(default_factory=dict)
    answers: list[int] = field(default_factory=list)


class Simulation:
    """One simulated run.

    Attributes:
        hybrid: number of hybrid replicas (those on the trainer's accelerators); above 0 only in a subclass.

    Args:
        times: durations of steps, updates, transfers and rewards, and the lengths of answers.
        seed: seed of random choices. If None, the lengths of answers are not drawn at random but are those of the
            recorded groups, in recorded order, and all other choices use seed 0.
    """

    hybrid = 0

    def __init__(self, scenario: Scenario, times: Times, seed: int | None = 0) -> None:
        self.scenario, self.times = scenario, times
        self._replays = seed is None
        self.clock = Clock()
        # Draw lengths from a random generator of their own, so that other random choices do not change them.
        self._random, self._lengths = random.Random(seed or 0), random.Random(seed or 0)
        gate = GateSettings(
            scenario.batch_groups, scenario.batches_per_version, scenario.max_staleness, scenario.pipeline_depth
        )
        target = scenario.steps * scenario.batch_groups
        kind = Turns if scenario.shared else WholeBatches if scenario.whole_batches else OldestReady
        self.ledger = SampleLedger(gate, target_groups=target, policy=kind())
        self.manager = PromptManager(self.ledger, scenario.answers, scenario.slots * scenario.replicas)
        self._timeline = Timeline(self.clock)
        self._timeline.lane.take()
        self._lane = Lane(self.clock, Why.GATE)
        self._lane.take()
        self._told: list[Event] = []
        read = times.read_s
        self.engines = [
            Engine(self.clock, scenario.places, times.step_s, read, self._sampled) for _ in range(scenario.replicas)
        ]
        self._loads = [(0, number) for number in range(scenario.replicas)]
        self._groups: dict[int, _Group] = {}
        self._at: dict[str, int] = {}
        self._held: dict[tuple[int, int], Request] = {}
        self._publishing = self._over = False
        self._scoring = self._issued = 0
        self._scorers = [0.0] * scenario.reward_processes
        self.decisions_s = self._agents_free = 0.0
        self._tokens: list[int] = []
        self._ended: list[float] = []
        self._ages: dict[int, int] = {}
        self._books = {"sampled": 0, "trained": 0}

    def run(self) -> Result:
        """Simulate the run to its end; raise `CannotPlan` if it deadlocks before the end."""
        self.begin()
        self.clock.run(lambda: self._over)
        if not self._over:
            raise CannotPlan(
                f"the simulated run stands still after {self.clock.now:g} s, because the event record contradicts "
                f"itself: give the record of another run. Prompts: {self.ledger.counts()}. Settings: {self.scenario}"
            )
        self._timeline.stop()
        return self._result()

    def begin(self) -> None:
        """Schedule the first actions of the run, at virtual time 0."""
        self._timeline.restart()
        self.manager.open()
        if self.scenario.shared:
            self.manager.slots = 0
        self._issue()
        self.clock.start(self._train())

    # The methods below simulate the trainer, in the order of the steps of `AsyncPPOTrainer`.

    def _train(self) -> Process:
        scenario, times = self.scenario, self.times
        for _ in range(scenario.steps):
            with self._timeline.phase("wait"):
                yield from self._wait_for_batch()
                batch = self._timed(self.ledger.take)
                if scenario.shared:
                    yield self._end_turn()
            lengths = [length for group in batch for length in self._groups[group.id].answers]
            ranks = scenario.trainer_ranks
            with self._timeline.phase("train"):
                yield times.driver_s
                with self._timeline.phase("log_probs"):
                    yield times.log_probs_s(lengths, ranks)
                with self._timeline.phase("update"):
                    yield times.update_s(lengths, ranks)
            self._trained(lengths)
            if self.ledger.batches_left == 0:
                with self._timeline.phase("sync"):
                    yield lambda: not self._publishing
                    yield times.snapshot_s
                    self._timed(self.ledger.seal)
                    self._issue()
                    self._publishing = True
                    self.clock.start(self._bring())
                    if not scenario.beside or scenario.shared:
                        yield lambda: not self._publishing
            self._ended.append(self.clock.now)
        self._over = True

    def _wait_for_batch(self) -> Process:
        """Wait until the trainer may take a batch.

        If training and generation take turns, begin a turn of generation first.
        """
        if self.scenario.shared:
            self._open_engines()
            self.manager.slots = self.scenario.slots * self.scenario.replicas
            self._go_on()
            self._issue()
        self._why()
        yield self.ledger.may_take

    def _serving(self) -> list[Engine]:
        """Return the engines that serve requests while weights are sent."""
        return [] if self.scenario.shared else self.engines

    def _trained(self, lengths: list[int]) -> None:
        for group in self.ledger.leased():
            for version, tokens in self._groups.pop(group.id).versions.items():
                age = self.ledger.version - version
                self._ages[age] = self._ages.get(age, 0) + tokens
        self._timed(self.ledger.mark_trained)
        self._tokens.append(sum(lengths))
        self._books["trained"] += sum(lengths)
        self._issue()

    # The methods below simulate weight syncs, in the order of a real one.

    def _bring(self) -> Process:
        scenario, times = self.scenario, self.times
        yield times.stage_s
        if scenario.at_swap == "drain" and self._serving():
            if not scenario.whole_batches:
                self.manager.drain()
            yield lambda: not self.manager.running and not (scenario.whole_batches and self._may_start())
            self.manager.drain()
            self._why()
        rest = max(engine.rest_s for engine in self.engines)
        cut: list[Request] = []
        for engine in self._serving():
            if scenario.at_swap == "keep":
                for request in engine.hold():
                    self._label(engine, request)
            else:
                cut += self._interrupt(engine)
        yield rest
        # Send interrupted requests to the engines again at once; they wait there for the new weights.
        self._resume(cut)
        yield max(0.0, times.swap_s - rest)
        self._timed(self.ledger.announce)
        if not scenario.shared:
            self._open_engines()
            self.manager.open()
        self._publishing = False
        self._issue()

    def _may_start(self) -> bool:
        return self.manager.anything_waits() or self.ledger.can_issue()

    def _label(self, engine: Engine, request: Request) -> None:
        """Record that the present version sampled all tokens of a request since the previous call for the request."""
        known = sum(tokens for _, tokens in request.versions)
        if (more := engine.tokens_of(request) - known) > 0:
            request.versions.append((self.ledger.announced, more))

    def _leave(self, engine: Engine, request: Request) -> None:
        """Record that a request has left its engine, because it is complete or interrupted."""
        self._label(engine, request)
        self._at.pop(request.name, None)

    def _interrupt(self, engine: Engine) -> list[Request]:
        found = engine.cut()
        for request in found:
            self._leave(engine, request)
        return found

    def _resume(self, requests: Iterable[Request]) -> None:
        for request in requests:
            request.work = Work.AGAIN if request.tokens else request.work
            self._through_agents(request)

    def _open_engines(self) -> None:
        for engine in self.engines:
            if engine.closed:
                engine.reopen(again=True)

    def _end_turn(self) -> float:
        """End the turn of generation. Return the seconds until all engines have finished their current decode steps."""
        rest = max(engine.rest_s for engine in self.engines)
        for engine in self.engines:
            for request in self._interrupt(engine):
                self._held[request.group, request.index] = request
            engine.close(Class.WAIT_OTHER_SIDE)
        self.manager.slots = 0
        self._why()
        return rest

    # The methods below simulate generation and rewards.

    def _issue(self) -> None:
        began = time.process_time()
        picked = list(self.manager.picks(self._issue_one))
        self.decisions_s += time.process_time() - began
        for trajectory in picked:
            self._begin(trajectory)
        self._why()
        self.clock.changed()

    def _issue_one(self) -> bool:
        number = self._issued = self._issued + 1
        group = self.manager.issue(PromptRef(number, 0, str(number)))
        groups = self.times.groups
        lengths = groups[(number - 1) % len(groups)] if self._replays else self.times.lengths(self._lengths)
        # Repeat the lengths if the recorded group has fewer answers than a group of the scenario.
        of_answers = [lengths[n % len(lengths)] for n in range(self.scenario.answers)]
        self._groups[group.id] = _Group(self.scenario.answers, of_answers)
        return True

    def _begin(self, trajectory: Trajectory) -> None:
        group_id, index = trajectory.group_id, trajectory.index
        request = Request(
            f"{group_id}-{index}", group_id, index, self._groups[group_id].lengths[index], self.times.prompt
        )
        self._through_agents(request)

    def _go_on(self) -> None:
        """Resume the requests that the end of the previous generation turn interrupted, oldest group first."""
        self._resume([self._held.pop(key) for key in sorted(self._held)])

    def _through_agents(self, request: Request) -> None:
        """Pass a request through the agent loops, which handle one request at a time, and then send it to an engine."""
        self._agents_free = max(self._agents_free, self.clock.now) + self.times.agents_s
        wait = self._agents_free - self.clock.now + self.times.begin_s
        self.clock.after(wait, lambda: self._send(request))

    def _send(self, request: Request) -> None:
        if not self.manager.slots:
            self._held[request.group, request.index] = request
            return
        number = self._least_loaded()
        self._at[request.name] = number
        self.engines[number].submit(request)
        heapq.heappush(self._loads, (self.engines[number].load, number))

    def _least_loaded(self) -> int:
        """Return the index of the engine with the fewest requests; correct outdated entries of the heap ``_loads``."""
        while True:
            load, number = heapq.heappop(self._loads)
            if load == self.engines[number].load:
                return number
            heapq.heappush(self._loads, (self.engines[number].load, number))

    def _sampled(self, request: Request) -> None:
        number = self._at[request.name]
        self._leave(self.engines[number], request)
        heapq.heappush(self._loads, (self.engines[number].load, number))
        self.clock.after(self.times.end_s, lambda: self._free(request))

    def _free(self, request: Request) -> None:
        self._books["sampled"] += request.tokens
        self._timed(lambda: self.manager.sampled(Trajectory(request.group, request.index)))
        self._scoring += 1
        takes = self.times.reward_s(self._random)
        self.clock.after(self._waits_for_scorer(takes) + takes, lambda: self._scored(request))
        self._issue()

    def _waits_for_scorer(self, takes: float) -> float:
        if not self._scorers:
            return 0.0
        begins = max(self.clock.now, self._scorers[0])
        heapq.heapreplace(self._scorers, begins + takes)
        return begins - self.clock.now

    def _scored(self, request: Request) -> None:
        self._scoring -= 1
        group = self._groups[request.group]
        group.left -= 1
        group.answers.append(request.tokens)
        for version, tokens in request.versions:
            group.versions[version] = group.versions.get(version, 0) + tokens
        if not group.left:
            oldest = min(group.versions)
            known = self.ledger.find(request.group)
            assert known is not None
            start = max(known.start, oldest)
            self._timed(lambda: self.manager.complete(request.group, start))
            self._issue()

    # The methods below record events and figures for the result.

    def _timed(self, decide: Callable[[], Decided]) -> Decided:
        """Return the result of ``decide``, and add its CPU time to `decisions_s`."""
        began = time.process_time()
        try:
            return decide()
        finally:
            self.decisions_s += time.process_time() - began

    def _why(self) -> None:
        waits = self._scoring > 0 and not self.ledger.may_take()
        why = self.manager.why(prompts_left=True, waits_for_rewards=waits)
        if why != self._lane.what:
            # Until now, free slots were idle for the old reason. Record the engines' events before the reason changes.
            self._ask_engines()
            self._lane.turn_to(why)

    def _ask_engines(self) -> None:
        for number, engine in enumerate(self.engines):
            self._told += [
                Event(f"{ROLLOUT} {number}", *span[:4], tokens=span.tokens) for span in engine.activity.take()
            ]

    def _events(self) -> Iterator[Event]:
        for lane, spans in ((TRAINER, self._timeline.lane.take()), (SCHEDULER, self._lane.take())):
            for span in spans:
                yield Event(lane, span.what, span.start, span.end, span.share)
        self._ask_engines()
        yield from self._told

    def _result(self) -> Result:
        sizes = {TRAINER: self.scenario.trainer_ranks, ROLLOUT: self.scenario.replica_size}
        under_way = self._books["sampled"] - self._books["trained"]
        books = TokenBooks(sampled=self._books["sampled"], trained=self._books["trained"], in_flight=under_way)
        devices = Devices(sizes, self.scenario.shared, self.hybrid)
        account = close(list(self._events()), devices, self.clock.now, books)
        return Result(
            self._ended,
            self._tokens,
            self.ledger.staleness.mean,
            self.ledger.staleness.max,
            dict(sorted(self._ages.items())),
            account,
            self.decisions_s,
            self.ledger.counts().trained,
        )

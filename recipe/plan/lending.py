# SPDX-License-Identifier: Apache-2.0
"""Simulates runs in which the trainer's accelerators generate while the trainer waits (``placement=elastic``).

Contract: standalone replicas have accelerators of their own. Hybrid replicas run on the trainer's accelerators, and
sleep while it trains. The policy of real runs (`recipe.async_engine.core.lending`) decides when the hybrid replicas
wake and sleep; as in `Simulation`, the sample ledger and the staleness gate decide everything else. A request goes to
the awake engine with the fewest requests. If all awake engines are full, it waits, and requests of the oldest group go
first. An interrupted request keeps its tokens and their versions. When hybrid replicas wake, they have the version with
which the standalone replicas generate. Without standalone replicas, the simulated run has ``placement=shared``. Shown
by tests/plan/test_lending_simulation.py.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import count

from recipe.async_engine.core.lending import Demand, LendingPolicy, PlaceMeter, Places, look
from recipe.async_engine.record.events import SWITCH, Class
from recipe.plan.engine import Engine, Process, Request
from recipe.plan.simulation import Result, Scenario, Simulation
from recipe.plan.times import CannotPlan, Times
from recipe.report.account import KINDS, Kind


class LendingSimulation(Simulation):
    """A simulated run with hybrid replicas, which generate on the trainer's accelerators while the trainer waits.

    Attributes:
        switches: number of loans, that is, how often the hybrid replicas woke to generate.
        lent_s: seconds in which the hybrid replicas were awake.
        read_again: number of tokens that were prefilled again because the end of a loan had interrupted their requests.
    """

    def __init__(
        self,
        scenario: Scenario,
        times: Times,
        policy: LendingPolicy | None = None,
        seed: int | None = 0,
    ) -> None:
        """Create a run with ``scenario.replicas`` standalone replicas and, on all trainer accelerators, hybrid ones.

        The hybrid replicas have the lowest numbers, as in a real run.
        """
        if times.switch is None:
            raise CannotPlan(
                "placement=elastic cannot be simulated: the event record does not show how long replicas on the "
                "trainer's accelerators take to wake and to go to sleep; record a run that lends (placement=elastic)"
            )
        self.switch, self.policy = times.switch, policy or LendingPolicy()
        self.standalone = scenario.replicas
        self.hybrid = scenario.trainer_ranks // scenario.replica_size
        super().__init__(replace(scenario, replicas=self.standalone + self.hybrid), times, seed)
        self.switches = self.read_again = 0
        self.lent_s = self._taken_at = 0.0
        self._asleep = set(range(self.hybrid))
        self._queue: list[tuple[int, int, int, Request]] = []
        self._numbers = count()
        self._meter = PlaceMeter(self.clock, self.standalone * scenario.places)
        # For each request that is at an engine, by name: the value that `PlaceMeter.begin` returned for the request.
        self._began: dict[str, float] = {}
        self._sampled_at: dict[int, float] = {}
        for number in self._asleep:
            self.engines[number].close(Class.WAIT_OTHER_SIDE)

    def useful_share(self, result: Result) -> float:
        """Return the share of all accelerator time that was spent on training or generation."""
        devices = self.scenario.trainer_ranks + self.standalone * self.scenario.replica_size
        useful = sum(seconds for name, seconds in result.account.total.items() if KINDS[Class(name)] is Kind.USEFUL)
        return useful / (devices * self.clock.now)

    def begin(self) -> None:
        self._use_slots()
        super().begin()

    def _wait_for_batch(self) -> Process:
        self._why()
        asked = self.clock.now
        while not self.ledger.may_take():
            yield lambda: self.ledger.may_take() or self._lends()
            if not self.ledger.may_take():
                yield from self._lend()
        if self._ended:
            self.policy.train_s.add(asked - self._taken_at)
        self._taken_at = self.clock.now

    def _lends(self) -> bool:
        """Return whether to lend now: never while a version is being published, else as the policy decides."""
        return self.ledger.version == self.ledger.announced and self.policy.lends(*self._view())

    def _lend(self) -> Process:
        self.switches += 1
        decided = self.clock.now
        with self._timeline.phase(SWITCH):
            yield self.switch.wake_s
        self.policy.woke(self.clock.now - decided)
        woken = self.clock.now
        for number in sorted(self._asleep):
            self.engines[number].reopen()
        self._asleep.clear()
        self._use_slots()
        self._give_places()
        self._issue()
        yield lambda: self.policy.calls_back(*self._view())
        decided = self.clock.now
        self.lent_s += decided - woken
        with self._timeline.phase(SWITCH):
            yield max(self._call_back(), self.switch.sleep_s)
        self.policy.sleep_s.add(self.clock.now - decided)

    def _call_back(self) -> float:
        """Interrupt the hybrid replicas. Return the seconds until they have finished their current decode steps."""
        hybrid = self.engines[: self.hybrid]
        rest = max(engine.rest_s for engine in hybrid)
        cut: list[Request] = []
        for engine in hybrid:
            cut += self._interrupt(engine)
            engine.close(Class.WAIT_OTHER_SIDE)
        self._asleep = set(range(self.hybrid))
        self._use_slots()
        self.read_again += sum(request.tokens for request in cut)
        self._resume(cut)
        return rest

    def _view(self) -> tuple[Places, Demand]:
        """Return the inputs of the lending policy: the engines' sequence slots, and what the trainer needs next."""
        standalone, hybrid = (self.scenario.places * count for count in (self.standalone, self.hybrid))
        return look(self.manager, self._meter.spent, standalone, hybrid, is_awake=not self._asleep)

    def _use_slots(self) -> None:
        """Let trajectories use the slots of exactly those replicas that are awake."""
        awake = len(self.engines) - len(self._asleep)
        self.manager.slots = awake * self.scenario.slots
        self._meter.use(awake * self.scenario.places)

    def _serving(self) -> list[Engine]:
        return [engine for number, engine in enumerate(self.engines) if number not in self._asleep]

    def _open_engines(self) -> None:
        for engine in self._serving():
            if engine.closed:
                engine.reopen(again=True)
        self._give_places()

    def _send(self, request: Request) -> None:
        heapq.heappush(self._queue, (request.group, request.index, next(self._numbers), request))
        self._give_places()

    def _give_places(self) -> None:
        """Send waiting requests to the engines with the fewest requests. Requests of the oldest group go first."""
        loads = [(engine.load, number) for number, engine in enumerate(self.engines) if not engine.closed]
        heapq.heapify(loads)
        while self._queue and loads and loads[0][0] < self.scenario.slots:
            _, number = heapq.heappop(loads)
            *_, request = heapq.heappop(self._queue)
            self._at[request.name] = number
            self._began[request.name] = self._meter.begin()
            self.engines[number].submit(request)
            heapq.heappush(loads, (self.engines[number].load, number))

    def _leave(self, engine: Engine, request: Request) -> None:
        super()._leave(engine, request)
        self._meter.leave(self._began.pop(request.name), request.group)

    def _sampled(self, request: Request) -> None:
        self._leave(self.engines[self._at[request.name]], request)
        self.clock.after(self.times.end_s, lambda: self._free(request))
        self._give_places()

    def _free(self, request: Request) -> None:
        super()._free(request)
        if self.manager.is_sampled(request.group):
            self._meter.sampled(request.group)
            self._sampled_at[request.group] = self.clock.now

    def _scored(self, request: Request) -> None:
        if self._groups[request.group].left == 1:
            self.policy.reward_s.add(self.clock.now - self._sampled_at.pop(request.group))
            self.policy.group_place_s.add(self._meter.end(request.group))
        super()._scored(request)


def simulated(scenario: Scenario, times: Times, seed: int | None = 0) -> Simulation:
    """Return the simulation of a run, which lends the trainer's accelerators if the scenario says so."""
    return LendingSimulation(scenario, times, seed=seed) if scenario.lends else Simulation(scenario, times, seed)

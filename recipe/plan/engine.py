# SPDX-License-Identifier: Apache-2.0
"""A virtual clock, and a simulated rollout engine with continuous batching.

Contract of the clock: time never goes backwards. Actions that are due at the same time run in the order in which they
were scheduled, so the simulation is deterministic. A process is a generator. To wait, it yields a number of seconds or
a condition; `Clock.changed` tests the conditions.

Contract of the engine: it has ``places`` sequence slots, as many as verl's `rollout.max_num_seqs`. A request joins at
the beginning of a decode step if a slot is free; otherwise it queues, and requests of the oldest group join first. Each
step samples one token for every running request. A step also prefills the context of the requests that join at it. The
prefill in one step is limited: no further request joins once it takes as long as `READ_STEPS` decode steps. The time of
a step grows linearly with the context. A paused engine finishes its current step first. The engine reports the use of
its slots to `EngineActivity`, as real engines do. All steps between two events are computed at once, so the cost of
simulating does not depend on the number of tokens. Shown by tests/plan/test_simulation.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count

from recipe.async_engine.record.activity import EngineActivity, Work
from recipe.async_engine.record.events import Class

Process = Generator[float | Callable[[], bool], None, None]


class Clock:
    """The virtual clock of a simulation. ``now`` is the present time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting: list[tuple[Callable[[], bool], Process]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` to run ``seconds`` after the present time."""
        heapq.heappush(self._due, (self.now + max(0.0, seconds), next(self._numbers), action))

    def start(self, process: Process) -> None:
        """Run ``process`` until it waits, and schedule its continuation for the end of the wait."""
        for wanted in process:
            if not callable(wanted):
                self.after(wanted, lambda: self.start(process))
                return
            if not wanted():
                self._waiting.append((wanted, process))
                return

    def changed(self) -> None:
        """Resume the waiting processes whose condition holds now. Call this whenever a condition may have changed."""
        for waiting in [waiting for waiting in self._waiting if waiting[0]()]:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self.after(0.0, lambda process=waiting[1]: self.start(process))  # type: ignore[misc]

    def run(self, over: Callable[[], bool]) -> None:
        """Run the scheduled actions in the order of their times, until ``over`` returns True or no action is left."""
        while self._due and not over():
            self.now, _, action = heapq.heappop(self._due)
            action()


@dataclass(eq=False, slots=True)
class Request:
    """A request for an answer of ``length`` tokens.

    Attributes:
        tokens: number of sampled tokens when the request last joined or left an engine.
        entered: number of steps that the engine had made when the request joined.
        versions: (policy version, number of tokens that it sampled), in order.
    """

    name: str
    group: int
    index: int
    length: int
    prompt: int = 0
    tokens: int = 0
    entered: int = 0
    work: Work = Work.NEW
    versions: list[tuple[int, int]] = field(default_factory=list)


READ_STEPS = 4
"""Limit of the time for prefill in one step, in decode steps of a full engine. The number is an assumption."""


class Engine:
    """A simulated rollout engine with continuous batching.

    All decode steps until the next event (an answer ends or a request joins) are planned at once.

    Args:
        places: number of requests that the engine decodes at once.
        step_s: returns the seconds of a decode step, given the number of requests and their total tokens of context.
        read_s: returns the seconds that prefilling a number of tokens adds to a step.
        ended: called with each request whose last token has been sampled.
    """

    def __init__(
        self,
        clock: Clock,
        places: int,
        step_s: Callable[[int, int], float],
        read_s: Callable[[int], float],
        ended: Callable[[Request], None],
    ) -> None:
        self._clock, self._places, self._step_s, self._read_s, self._ended = clock, places, step_s, read_s, ended
        self.activity = EngineActivity(clock, places)
        self.activity.open()
        self.activity.take()
        self.running: dict[str, Request] = {}
        self._waiting: list[tuple[int, int, Request]] = []
        self._ends: list[tuple[int, str]] = []
        self._new: list[Request] = []
        # Names of requests that arrived while the engine was closed. `activity` is told of them when the engine
        # reopens.
        self._parked: dict[str, None] = {}
        self._steps = self._context = self._planned = self._number = self._arrived = 0
        self._began = self._first = self._step = self._slope = 0.0
        self.closed = False

    @property
    def load(self) -> int:
        return len(self.running) + len(self._waiting)

    @property
    def rest_s(self) -> float:
        """The seconds until the current decode step ends. Requests can be interrupted only at the end of a step."""
        if self.closed or not self.running:
            return 0.0
        return max(0.0, self._began + self._seconds(self._begun_steps()) - self._clock.now)

    def submit(self, request: Request) -> None:
        """Queue a request. If the engine is closed, the request waits until the engine reopens."""
        self._arrived += 1
        heapq.heappush(self._waiting, (request.group, self._arrived, request))
        self.activity.expect(request.name, request.work)
        if self.closed:
            self._parked[request.name] = None
            return
        self.activity.enter(request.name)
        if len(self.running) < self._places:
            self._stop_after(self._whole_steps() + 1 if self.running else 0)

    def cut(self) -> list[Request]:
        """Pause the engine. Remove all of its requests, and return them with the tokens that they have so far."""
        self.hold()
        return self._give_back()

    def hold(self) -> list[Request]:
        """Pause the engine; return its running requests, which keep their slots."""
        self._count(self._begun_steps())
        ended = self._take_ended()
        self.close(Class.WAIT_WEIGHTS)
        for request in ended:
            self._ended(request)
        return list(self.running.values())

    def reopen(self, again: bool = False) -> None:
        """End a pause. With ``again``, the requests that have kept their slots are prefilled again."""
        self.closed = False
        self.activity.open()
        for name in self._parked:
            self.activity.enter(name)
        self._parked.clear()
        if again:
            self.activity.recompute(self.running)
            self._new = list(self.running.values())
        self._plan()

    def close(self, why: Class) -> None:
        """Begin a pause, which lasts until `reopen`. The engine reports the reason ``why`` for the pause."""
        self.closed = True
        self._number += 1
        self.activity.close(why)

    def tokens_of(self, request: Request) -> int:
        at_engine = request.name in self.running
        return request.tokens + (self._steps + self._whole_steps() - request.entered if at_engine else 0)

    def _give_back(self) -> list[Request]:
        waiting = [request for *_, request in sorted(self._waiting)]
        found = [*self.running.values(), *waiting]
        for request in self.running.values():
            self._leave(request)
        for request in waiting:
            if request.name not in self._parked:
                self.activity.leave(request.name)
        self._parked.clear()
        for request in found:
            self.activity.forget(request.name)
        self.running, self._ends, self._new, self._context = {}, [], [], 0
        self._waiting.clear()
        return found

    def _whole_steps(self) -> int:
        """Return how many of the planned decode steps have ended by now."""
        if self.closed or not self.running or self._step <= 0:
            return 0
        spent = self._clock.now - self._began - self._first + self._step + 1e-9
        if spent < self._step:
            return 0
        if self._slope <= 0:
            return min(self._planned, int(spent / self._step))
        half = self._step - self._slope / 2
        return min(self._planned, int((math.sqrt(half * half + 2 * self._slope * spent) - half) / self._slope))

    def _begun_steps(self) -> int:
        """Return how many of the planned decode steps have begun by now."""
        return min(self._planned, self._whole_steps() + 1) if self.running and not self.closed else 0

    def _seconds(self, steps: int) -> float:
        return self._first + self._step * (steps - 1) + self._slope * steps * (steps - 1) / 2 if steps else 0.0

    def _stop_after(self, steps: int) -> None:
        """Shorten the plan to ``steps`` decode steps, so that a request can join after them."""
        if self.running and steps >= self._planned:
            return
        self._planned = steps
        self._number += 1
        number, left = self._number, self._began + self._seconds(steps) - self._clock.now if steps else 0.0
        self._clock.after(left, lambda: self._boundary(number))

    def _boundary(self, number: int) -> None:
        if number != self._number:
            return
        self._count(self._planned)
        ended = self._take_ended()
        self._plan()
        for request in ended:
            self._ended(request)

    def _take_ended(self) -> list[Request]:
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            request = self.running.pop(heapq.heappop(self._ends)[1])
            self._leave(request)
            self.activity.answer(request.name, request.tokens)
            self.activity.forget(request.name)
            ended.append(request)
        return ended

    def _count(self, steps: int) -> None:
        """Count ``steps`` of the planned decode steps as done for each running request. Drop the rest of the plan."""
        self._steps += steps
        self._context += steps * len(self.running)
        if steps:
            for request in self._new:
                self.activity.output(request.name, self._steps - request.entered)
            self._new = []
        self._planned = 0

    def _leave(self, request: Request) -> None:
        sampled = self._steps - request.entered
        if sampled:
            self.activity.output(request.name, sampled)
        self.activity.leave(request.name)
        request.tokens += sampled
        self._context -= request.prompt + request.tokens

    def _plan(self) -> None:
        """Let queued requests join as far as slots and prefill time allow, and plan the steps until the next event."""
        left = READ_STEPS * self._step_s(self._places, self._context) if self._waiting else 0.0
        while self._waiting and len(self.running) < self._places and left > 0:
            *_, request = heapq.heappop(self._waiting)
            left -= self._read_s(request.prompt + request.tokens)
            request.entered = self._steps
            self.running[request.name] = request
            self._context += request.prompt + request.tokens
            heapq.heappush(self._ends, (self._steps + max(1, request.length - request.tokens), request.name))
            self._new.append(request)
        self._number += 1
        if not self.running:
            return
        batch = len(self.running)
        self._began = self._clock.now
        self._step = self._step_s(batch, self._context)
        self._slope = max(0.0, self._step_s(batch, self._context + batch) - self._step)
        self._first = self._step + sum(self._read_s(request.prompt + request.tokens) for request in self._new)
        self._planned = 1 if self._new else self._ends[0][0] - self._steps
        number = self._number
        self._clock.after(self._seconds(self._planned), lambda: self._boundary(number))

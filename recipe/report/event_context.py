# SPDX-License-Identifier: Apache-2.0
"""Assigns a class of time to each event of a device, by what trainer, scheduler, engines and agents did meanwhile.

Contract: if the activities that determine the class change during an event, the event is split, so that each part has
one class. The tables in this module give the class for each activity; an activity that is in no table has the class
`Class.NOT_KNOWN`. Shown by tests/report/test_account.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from recipe.async_engine.core.prompt_manager import Why
from recipe.async_engine.record.events import (
    AGENTS,
    EMPTY,
    NOWHERE,
    ROLLOUT,
    SCHEDULER,
    SCORES,
    SWITCH,
    TRAINER,
    Away,
    Class,
    Event,
)

WAIT, VALIDATE = "wait", "validate"
"""The phases in which the trainer leaves shared accelerators to the engines. So the class of these accelerators' time
depends on what the engines do.
"""

PHASES: Mapping[str, Class] = {
    "update": Class.TRAINING,
    "log_probs": Class.LOG_PROBS,
    "train": Class.WAIT_DRIVER,
    "other": Class.WAIT_DRIVER,
    "sync": Class.WAIT_WEIGHTS,
    "save": Class.WAIT_CHECKPOINT,
    SCORES: Class.WAIT_LOG_PROBS,
    VALIDATE: Class.WAIT_VALIDATION,
    WAIT: Class.WAIT_BATCH,
    SWITCH: Class.WAIT_SWITCH,
    Class.START_UP: Class.START_UP,
}
"""The class of the trainer's time in each phase of the trainer."""

FREE_FOR: Mapping[str, Class] = {
    Why.GENERATING: Class.IDLE_PLACES,
    Why.LAST_OF_GATE: Class.WAIT_TAIL,
    Why.LAST_OF_DRAIN: Class.WAIT_WEIGHTS,
    Why.LAST_OF_TURN: Class.WAIT_OTHER_SIDE,
    Why.LAST_OF_PROMPTS: Class.WAIT_PROMPTS,
    Why.LAST_OF_END: Class.WAIT_END,
}
"""The class of a free sequence slot while other slots are in use, for each reason that the scheduler reports (`Why`).
"""

EMPTY_FOR: Mapping[str, Class] = {
    Why.DRAIN: Class.WAIT_WEIGHTS,
    Why.TURN: Class.WAIT_OTHER_SIDE,
    Why.GATE: Class.WAIT_GATE,
    Why.PROMPTS: Class.WAIT_PROMPTS,
    Why.END: Class.WAIT_END,
    Class.START_UP: Class.START_UP,
}
"""The class of an engine's time while no trajectory generates, for each reason that the scheduler reports (`Why`)."""

BUSY = frozenset({Class.DECODING, Class.PREFILL, Class.RE_PREFILL, Class.RETRY})
"""The classes in which an engine generates for training."""

KNOWN = frozenset(Class)


class Track:
    """A value that changes only at certain times. Before the first change it is None."""

    def __init__(self, changes: Mapping[float, str | None]) -> None:
        self._times = sorted(changes)
        self._values = [None, *(changes[time] for time in self._times)]

    def during(self, start: float, end: float) -> Iterator[tuple[float, float, str | None]]:
        """Yield (start, end, value) of each period between ``start`` and ``end`` in which the value does not change."""
        index = bisect_right(self._times, start)
        while start < end:
            stop = min(end, self._times[index]) if index < len(self._times) else end
            if stop > start:
                yield start, stop, self._values[index]
            start, index = stop, index + 1


Part = tuple[float, float, Class]
"""A part of an event: its start, its end and its class."""


class Context(NamedTuple):
    """What the components of a run did over time, each as a `Track`.

    Attributes:
        phases: phase of the trainer.
        whys: the scheduler's reason for starting no more trajectories.
        engines: `ROLLOUT` while any engine generates for training, else None.
        away: what trajectories do outside of engines, such as tool calls; several activities are joined by "+".
    """

    phases: Track
    whys: Track
    engines: Track
    away: Track

    @classmethod
    def of(cls, events: Iterable[Event]) -> Context:
        lanes: dict[str, list[Event]] = {TRAINER: [], SCHEDULER: [], ROLLOUT: [], AGENTS: []}
        for event in events:
            kind = event.lane.partition(" ")[0]
            if event.end > event.start and kind in lanes and (kind != ROLLOUT or event.what in BUSY):
                lanes[kind].append(event)
        return cls(
            _one_at_a_time(lanes[TRAINER]),
            _one_at_a_time(lanes[SCHEDULER]),
            _any_of(lanes[ROLLOUT], lambda event: [ROLLOUT]),
            _any_of(lanes[AGENTS], lambda event: () if event.what == NOWHERE else event.what.split("+")),
        )

    def during(self, event: Event, until: float, shared: bool) -> Iterator[Part]:
        """Yield the parts of an event up to ``until``, each with one class.

        ``shared`` is whether trainer and engine share accelerators.
        """
        if event.lane == TRAINER and event.what != WAIT:
            yield event.start, until, PHASES.get(event.what, Class.NOT_KNOWN)
            return
        for begin, stop, why in self.whys.during(event.start, until):
            if event.lane == TRAINER:
                yield from self._of_waiting_trainer(begin, stop, why)
                continue
            if not shared:
                yield from self._of_engine(event, begin, stop, why)
                continue
            for start, end, phase in self.phases.during(begin, stop):
                if phase in (None, Class.START_UP) and event.what == Class.WAIT_OTHER_SIDE:
                    yield start, end, Class.START_UP
                elif phase in (WAIT, VALIDATE) and event.what == Class.WAIT_OTHER_SIDE:
                    asleep = self._of_waiting_trainer(start, end, why)
                    yield from asleep if phase == WAIT else [(start, end, Class.WAIT_VALIDATION)]
                elif phase not in (WAIT, VALIDATE, Class.START_UP, None):
                    yield start, end, PHASES.get(phase, Class.NOT_KNOWN)
                else:
                    yield from self._of_engine(event, start, end, why)

    def _of_waiting_trainer(self, begin: float, stop: float, why: str | None) -> Iterator[Part]:
        if why == Why.REWARD:
            yield from self._of_rewards(begin, stop)
        else:
            yield begin, stop, PHASES.get(WAIT, Class.NOT_KNOWN)

    def _of_rewards(self, begin: float, stop: float) -> Iterator[Part]:
        """Divide a period, in which the run waits only for rewards or log-probs, by which of these it waits for.

        Yield the parts of the period, each with its class.
        """
        for start, end, away in self.away.during(begin, stop):
            scores_only = away is not None and Away.LOG_PROBS in away and Away.REWARD not in away
            yield start, end, Class.WAIT_LOG_PROBS if scores_only else Class.WAIT_REWARD

    def _of_engine(self, event: Event, begin: float, stop: float, why: str | None) -> Iterator[Part]:
        if event.what == Class.IDLE_PLACES:
            yield begin, stop, FREE_FOR.get(why or "", Class.IDLE_PLACES)
        elif event.what != EMPTY:
            yield begin, stop, Class(event.what) if event.what in KNOWN else Class.NOT_KNOWN
        elif (free := FREE_FOR.get(why or "")) is not None:
            yield from self._of_empty(begin, stop, free)
        elif why == Why.REWARD:
            yield from self._of_rewards(begin, stop)
        else:
            # The scheduler reports why it waits as soon as it has started. So idle time before its first reason is
            # start-up.
            yield begin, stop, EMPTY_FOR.get(why or Class.START_UP, Class.NOT_KNOWN)

    def _of_empty(self, begin: float, stop: float, free: Class) -> Iterator[Part]:
        """Divide a period into parts of one class each, and yield them.

        Throughout the period, the engine has no request, although trajectories are unfinished.
        """
        for first, last, engines in self.engines.during(begin, stop):
            if engines and free is not Class.IDLE_PLACES:
                yield first, last, free
                continue
            for start, end, away in self.away.during(first, last):
                yield start, end, Class.WAIT_TOOLS if away and Away.TOOLS in away else Class.WAIT_AGENTS


def _one_at_a_time(events: Iterable[Event]) -> Track:
    """Return a `Track` of the activities in ``events``, which do not overlap."""
    changes: dict[float, str | None] = {}
    for event in sorted(events, key=lambda event: event.start):
        changes[event.start] = event.what
        changes.setdefault(event.end, None)
    return Track(changes)


def _any_of(events: Iterable[Event], values: Callable[[Event], Iterable[str]]) -> Track:
    """Return a `Track` whose value at a time is the ``values`` of all events under way at that time, joined by "+"."""
    steps = [
        (time, by, name)
        for event in events
        for name in values(event)
        for time, by in ((event.start, 1), (event.end, -1))
    ]
    counts: Counter[str] = Counter()
    changes: dict[float, str | None] = {}
    last: str | None = None
    for time, by, name in sorted(steps):
        counts[name] += by
        now = "+".join(sorted(+counts)) or None
        if now != last or time in changes:
            changes[time] = last = now
    return Track(changes)

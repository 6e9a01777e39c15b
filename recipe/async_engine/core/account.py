# SPDX-License-Identifier: Apache-2.0
"""Where every second of every accelerator went, and every sampled token: an account over a run's record of events.

Contract: each second of a device's life is in exactly one class. What its events do not cover before its first one is
start-up; what they do not cover later is `Class.NOT_KNOWN`, which no other class ever takes in. An engine without a
request waits for whatever the scheduler says it gives nothing for; a trainer that waits for a batch waits for rewards
while only these keep the run from going on. Where both sides share their accelerators, a second is the engine's while
the trainer waits or validates, and the trainer's otherwise. Events that overlap make the sum exceed the life:
:attr:`Account.closes` is False then, as it is where a device's unknown time or the tokens do not come out.

Shown by tests/core/test_account.py and, of real runs, tests/e2e/accounts.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from recipe.async_engine.core.events import EMPTY, LOG_PROBS, ROLLOUT, RUN, SCHEDULER, TRAINER, Class, Event, Why

OFF_BY = 0.005
"""The share of a device's life by which its seconds may miss it: two clocks are compared."""


class Kind(StrEnum):
    """What a class is for whoever pays for the accelerator."""

    USEFUL = "useful"
    REPEATED = "repeated"
    WAITING = "waiting"
    IDLE = "idle"
    START_UP = "start_up"
    DOWN = "down"
    NOT_KNOWN = "not_known"


KINDS: Mapping[Class, Kind] = {
    Class.TRAINING: Kind.USEFUL,
    Class.LOG_PROBS: Kind.USEFUL,
    Class.DECODING: Kind.USEFUL,
    Class.PREFILL: Kind.USEFUL,
    Class.VALIDATING: Kind.USEFUL,
    Class.RE_PREFILL: Kind.REPEATED,
    Class.RETRY: Kind.REPEATED,
    Class.LOST: Kind.REPEATED,
    Class.WAIT_BATCH: Kind.WAITING,
    Class.WAIT_REWARD: Kind.WAITING,
    Class.WAIT_DRIVER: Kind.WAITING,
    Class.WAIT_WEIGHTS: Kind.WAITING,
    Class.WAIT_GATE: Kind.WAITING,
    Class.WAIT_PROMPTS: Kind.WAITING,
    Class.WAIT_AGENTS: Kind.WAITING,
    Class.WAIT_REQUESTS: Kind.WAITING,
    Class.WAIT_VALIDATION: Kind.WAITING,
    Class.WAIT_CHECKPOINT: Kind.WAITING,
    Class.WAIT_OTHER_SIDE: Kind.WAITING,
    Class.WAIT_END: Kind.WAITING,
    Class.IDLE_PLACES: Kind.IDLE,
    Class.START_UP: Kind.START_UP,
    Class.DOWN: Kind.DOWN,
    Class.NOT_KNOWN: Kind.NOT_KNOWN,
}

WAIT, VALIDATE = "wait", "validate"
"""Phases of the trainer in which the accelerators that it shares are the engine's."""

PHASES: Mapping[str, Class] = {
    "update": Class.TRAINING,
    "log_probs": Class.LOG_PROBS,
    "train": Class.WAIT_DRIVER,
    "other": Class.WAIT_DRIVER,
    "sync": Class.WAIT_WEIGHTS,
    "save": Class.WAIT_CHECKPOINT,
    VALIDATE: Class.WAIT_VALIDATION,
    WAIT: Class.WAIT_BATCH,
    Class.START_UP: Class.START_UP,
}
"""What a phase of the trainer's timeline is to its accelerators."""

EMPTY_FOR: Mapping[str, Class] = {
    Why.GENERATING: Class.WAIT_AGENTS,
    Why.DRAIN: Class.WAIT_WEIGHTS,
    Why.TURN: Class.WAIT_OTHER_SIDE,
    Why.GATE: Class.WAIT_GATE,
    Why.REWARD: Class.WAIT_REWARD,
    Why.PROMPTS: Class.WAIT_PROMPTS,
    Why.END: Class.WAIT_END,
    Class.START_UP: Class.START_UP,
}
"""What an engine without a request waits for, by what the scheduler says."""

BEGINS, ENDS = "begins", "ends"
"""On the run's lane: a device's life begins later than the run, or ends before it."""


@dataclass(frozen=True)
class Devices:
    """What a run's account is of.

    accelerators: of one device, by its lane's first word. shared: whether both sides have the same.
    """

    accelerators: Mapping[str, int]
    shared: bool = False

    def counts(self, lane: str) -> bool:
        """Whether this lane is a device of the account."""
        kind = lane.partition(" ")[0]
        return kind in (ROLLOUT, LOG_PROBS) or (lane == TRAINER and not self.shared)

    def size(self, lane: str) -> int:
        """Accelerators of a device, which do the same at any moment."""
        return int(self.accelerators.get(lane.partition(" ")[0], 1))


@dataclass(frozen=True)
class DeviceAccount:
    """One device: its accelerators, its life in seconds, and the seconds of each class that it has."""

    accelerators: int
    life: float
    seconds: Mapping[str, float]
    exceeds: float = 0.0

    @property
    def not_known(self) -> float:
        return self.seconds.get(Class.NOT_KNOWN, 0.0)

    @property
    def closes(self) -> bool:
        """Whether the classes are the life, but for what the comparison of clocks leaves open."""
        return abs(sum(self.seconds.values()) - self.life) <= OFF_BY * self.life and self.exceeds <= OFF_BY * self.life


@dataclass(frozen=True)
class TokenBooks:
    """Every token that an engine sampled for training in this start, and what became of it.

    sampled: by the engines' own counts. restored: of a checkpoint. trained, filtered, failed: in answers of groups that
    ended so. cut: thrown away, by retries, ended requests, agent loops that left them out. in_flight: in groups that
    had not ended.
    """

    sampled: int = 0
    restored: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    cut: int = 0
    in_flight: int = 0

    @property
    def not_known(self) -> int:
        """What no class has; negative where more came out than went in."""
        ended = self.trained + self.filtered + self.failed + self.cut + self.in_flight
        return self.sampled + self.restored - ended


NO_TOKENS = TokenBooks()


@dataclass(frozen=True)
class Account:
    """See the module's contract. Seconds are of one accelerator of the device; ``tokens``: None if nobody could say."""

    duration: float
    devices: Mapping[str, DeviceAccount]
    tokens: TokenBooks | None = NO_TOKENS

    @property
    def closes(self) -> bool:
        tokens_close = self.tokens is not None and self.tokens.not_known == 0
        return tokens_close and all(device.closes for device in self.devices.values())

    @property
    def total(self) -> dict[str, float]:
        """Accelerator-seconds by class, over all devices."""
        sums: defaultdict[str, float] = defaultdict(float)
        for device in self.devices.values():
            for name, seconds in device.seconds.items():
                sums[name] += seconds * device.accelerators
        return dict(sums)

    def summary(self) -> dict[str, Any]:
        """In the keys of ``summary.json``."""
        tokens = self.tokens
        return {
            "duration": self.duration,
            "closes": self.closes,
            "seconds": {
                name: {"accelerators": device.accelerators, "life": device.life, "not_known": 0.0, **device.seconds}
                for name, device in self.devices.items()
            },
            "accelerator_seconds": {"not_known": 0.0, **self.total},
            "tokens": None if tokens is None else {**vars(tokens), "not_known": tokens.not_known},
        }


class Piece(NamedTuple):
    """A stretch of time in which a device does one thing, with its share."""

    device: str
    start: float
    end: float
    what: Class
    share: float


def close(
    events: Sequence[Event],
    devices: Devices,
    until: float,
    tokens: TokenBooks | None = NO_TOKENS,
    found: Iterable[Piece] | None = None,
) -> Account:
    """The account of a run from 0 to ``until``, in seconds of the run's clock.

    Args:
        events: of all lanes or of those that `pieces` reads, in any order.
        found: what `pieces` gives for them, if it is at hand.
    """
    lives = _lives(events, devices, until)
    seconds: dict[str, defaultdict[str, float]] = {device: defaultdict(float) for device in lives}
    for piece in pieces(events, devices, until) if found is None else found:
        begins, ends = lives[piece.device]
        length = min(piece.end, ends) - max(piece.start, begins)
        if length > 0:
            seconds[piece.device][piece.what] += length * piece.share
    accounts = {}
    for device, (begins, ends) in lives.items():
        missing = ends - begins - sum(seconds[device].values())
        if missing > 0:
            seconds[device][Class.NOT_KNOWN] += missing
        by_class = {str(name): value for name, value in seconds[device].items()}
        accounts[device] = DeviceAccount(devices.size(device), ends - begins, by_class, max(0.0, -missing))
    return Account(until, accounts, tokens)


def pieces(events: Sequence[Event], devices: Devices, until: float) -> Iterator[Piece]:
    """What each device did, its start-up included, up to ``until``; gaps in between are left out."""
    context = _Context(events)
    lives = _lives(events, devices, until)
    starting = dict(lives)
    known: dict[tuple[bool, str, str | None, str | None], Class] = {}
    for event in sorted(events, key=lambda event: event.start):
        if event.lane not in lives:
            continue
        if event.lane in starting:
            begins, _ = starting.pop(event.lane)
            yield Piece(event.lane, begins, min(event.start, until), Class.START_UP, 1.0)
        for start, end, phase, why in context.during(event.start, min(event.end, until)):
            key = event.lane == TRAINER, event.what, phase, why
            if (what := known.get(key)) is None:
                what = known[key] = _classify(event, phase, why, devices.shared)
            yield Piece(event.lane, start, end, what, event.share)
    for device, (begins, ends) in starting.items():
        yield Piece(device, begins, ends, Class.START_UP, 1.0)


def _classify(event: Event, phase: str | None, why: str | None, shared: bool) -> Class:
    if event.lane == TRAINER:
        if event.what == WAIT and why == Why.REWARD:
            return Class.WAIT_REWARD
        return PHASES.get(event.what, Class.NOT_KNOWN)
    if shared and phase in (None, Class.START_UP) and event.what == Class.WAIT_OTHER_SIDE:
        return Class.START_UP
    if shared and phase not in (WAIT, VALIDATE, Class.START_UP, None):
        return PHASES.get(phase or "", Class.NOT_KNOWN)
    if event.what == EMPTY:
        # Before the scheduler begins.
        return EMPTY_FOR.get(why or Class.START_UP, Class.NOT_KNOWN)
    try:
        return Class(event.what)
    except ValueError:
        return Class.NOT_KNOWN


def _lives(events: Iterable[Event], devices: Devices, until: float) -> dict[str, tuple[float, float]]:
    """Beginning and end of each device's life."""
    named = {event.lane for event in events}
    begins = {lane: 0.0 for lane in sorted(named, key=_place) if devices.counts(lane)}
    ends: dict[str, float] = {}
    for event in events:
        if event.lane == RUN and event.text is not None:
            if event.what == BEGINS:
                begins[event.text] = event.start
            elif event.what == ENDS:
                ends[event.text] = event.start
    return {device: (began, min(until, ends.get(device, until))) for device, began in begins.items()}


def _place(lane: str) -> tuple[bool, bool, str, int]:
    """Where a device stands in an account: the trainer, then rollout engines by their numbers, then the others."""
    kind, _, number = lane.partition(" ")
    return lane != TRAINER, kind != ROLLOUT, kind, int(number) if number.isdigit() else 0


class _Context:
    """What trainer and scheduler did at any moment."""

    def __init__(self, events: Iterable[Event]) -> None:
        lanes: dict[str, list[Event]] = {TRAINER: [], SCHEDULER: []}
        for event in events:
            if event.lane in lanes and event.end > event.start:
                lanes[event.lane].append(event)
        phases, whys = _changes(lanes[TRAINER]), _changes(lanes[SCHEDULER])
        self._times = sorted({*phases, *whys})
        self._does: list[tuple[str | None, str | None]] = [(None, None)]
        phase = why = None
        for time in self._times:
            phase, why = phases.get(time, phase), whys.get(time, why)
            self._does.append((phase or None, why or None))

    def during(self, start: float, end: float) -> Iterator[tuple[float, float, str | None, str | None]]:
        """Stretches of this time in which neither changed, with what they did."""
        index = bisect_right(self._times, start)
        while start < end:
            stop = min(end, self._times[index]) if index < len(self._times) else end
            if stop > start:
                yield start, stop, *self._does[index]
            start, index = stop, index + 1


NOTHING = ""


def _changes(events: list[Event]) -> dict[float, str]:
    """What a lane does from each of these times on."""
    changes: dict[float, str] = {}
    for event in sorted(events, key=lambda event: event.start):
        changes[event.start] = event.what
        changes.setdefault(event.end, NOTHING)
    return changes

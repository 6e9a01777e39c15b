# SPDX-License-Identifier: Apache-2.0
"""Where every second of every accelerator went, and every sampled token: an account over a run's record of events.

Contract: each second of a device's life is in exactly one class. What its events do not cover before its first one is
start-up; what they do not cover later is `Class.NOT_KNOWN`, which no other class ever takes in. An engine without a
request, and a free place of one that has some, waits for whatever the scheduler says it gives nothing for, or for what
the trajectories that have its slots are at. A trainer that waits for a batch waits for rewards or log-prob servers
while only these keep the run from going on; while its ranks compute, they wait for the slowest of them for the share
of the time that they say. Where both sides share their accelerators, a second is the engine's while
the trainer waits or validates, and the trainer's otherwise. Events that overlap make the sum exceed the life:
:attr:`Account.closes` is False then, as it is where a device's unknown time or the tokens do not come out.

Shown by tests/report/test_account.py and, of real runs, tests/accounts.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, NamedTuple

from recipe.async_engine.record.events import (
    BEGINS,
    ENDS,
    NO_TOKENS,
    ROLLOUT,
    RUN,
    TRAINER,
    Class,
    Devices,
    Event,
    TokenBooks,
)
from recipe.report.event_context import Context

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
    Class.WAIT_RANKS: Kind.WAITING,
    Class.WAIT_BATCH: Kind.WAITING,
    Class.WAIT_REWARD: Kind.WAITING,
    Class.WAIT_LOG_PROBS: Kind.WAITING,
    Class.WAIT_DRIVER: Kind.WAITING,
    Class.WAIT_WEIGHTS: Kind.WAITING,
    Class.WAIT_GATE: Kind.WAITING,
    Class.WAIT_TAIL: Kind.WAITING,
    Class.WAIT_PROMPTS: Kind.WAITING,
    Class.WAIT_TOOLS: Kind.WAITING,
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
    context = Context.of(events)
    lives = _lives(events, devices, until)
    starting = dict(lives)
    for event in sorted(events, key=lambda event: event.start):
        if event.lane not in lives or event.start >= until:
            continue
        if event.lane in starting:
            begins, _ = starting.pop(event.lane)
            yield Piece(event.lane, begins, min(event.start, until), Class.START_UP, 1.0)
        for start, end, what, share in context.during(event, min(event.end, until), devices.shared):
            yield Piece(event.lane, start, end, what, event.share * share)
    for device, (begins, ends) in starting.items():
        yield Piece(device, begins, ends, Class.START_UP, 1.0)


def meanwhile(found: Iterable[Piece], devices: Devices) -> dict[Class, dict[Class, float]]:
    """What the other side did while one side waited for it.

    Of the trainer's accelerator-seconds in `Class.WAIT_BATCH`, how many had which class of the engines, their mean; of
    the engines' in `Class.WAIT_GATE` and `Class.WAIT_TAIL`, how many had which class of the trainer.
    """
    trainer = _Waits({Class.WAIT_BATCH})
    engines = _Waits({Class.WAIT_GATE, Class.WAIT_TAIL})
    by_side: dict[bool, list[Piece]] = {True: [], False: []}
    for piece in found:
        kind = piece.device.partition(" ")[0]
        if kind in (TRAINER, ROLLOUT):
            by_side[kind == TRAINER].append(piece)
            (trainer if kind == TRAINER else engines).note(piece)
    replicas = len({piece.device for piece in by_side[False]}) or 1
    size = devices.size(ROLLOUT)
    seconds = {what: trainer.beside(what, by_side[False], devices.size(TRAINER) / replicas) for what in trainer.kinds}
    return seconds | {what: engines.beside(what, by_side[True], size) for what in engines.kinds}


class _Waits:
    """When a side's devices were in some classes, and what others did then; pieces come by their starts."""

    def __init__(self, kinds: Collection[Class]) -> None:
        self.kinds = kinds
        self._changes: dict[Class, defaultdict[float, float]] = {what: defaultdict(float) for what in kinds}

    def note(self, piece: Piece) -> None:
        """Take in what a device of the side did."""
        if piece.what in self.kinds and piece.end > piece.start:
            changes = self._changes[piece.what]
            changes[piece.start] += piece.share
            changes[piece.end] -= piece.share

    def beside(self, what: Class, others: Iterable[Piece], each: float) -> dict[Class, float]:
        """Seconds of this class by the others' classes, ``each`` for a second of one of the others."""
        times = sorted(self._changes[what])
        levels = [0.0, *accumulate(self._changes[what][time] for time in times)]
        # Seconds of the class up to each of these times.
        lengths = [level * (end - start) for level, start, end in zip(levels[1:], times, times[1:], strict=False)]
        sums = [0.0, *accumulate(lengths)]

        def up_to(time: float) -> float:
            index = bisect_right(times, time)
            return sums[index - 1] + levels[index] * (time - times[index - 1]) if index else 0.0

        found: defaultdict[Class, float] = defaultdict(float)
        for other in others if times else ():
            found[other.what] += (up_to(other.end) - up_to(other.start)) * other.share * each
        return {name: seconds for name, seconds in found.items() if seconds > 0}


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
    return lane != TRAINER, kind != ROLLOUT, kind, int(number) if number.isdecimal() else 0

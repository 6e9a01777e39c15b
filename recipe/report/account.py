# SPDX-License-Identifier: Apache-2.0
"""Computes the time account of a run: the seconds of every accelerator in each class, from the run's events.

Contract: each second of a device (the trainer, an engine or a server) belongs to exactly one class, such as training,
decoding or waiting for a batch. Time before a device's first event is start-up. Later time that its events do not cover
is `Class.NOT_KNOWN` and is never added to another class. Idle time of an engine or of a sequence slot is classified by
the scheduler's reason for starting no more trajectories, or by what the unfinished trajectories do (tools, for
example). The trainer's wait for a batch has a class of its own if only rewards, or only log-prob servers, hold up the
run. If trainer and engine share accelerators, a second belongs to the engine while the trainer waits or validates, and
to the trainer otherwise. :attr:`Account.closes` is False if the seconds of a device do not add up to its total time, or
if the counts of sampled tokens disagree. Shown by tests/report/test_account.py and, with real runs, tests/accounts.py.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recipe.async_engine.record.event_file import events_of, read
from recipe.async_engine.record.events import (
    BEGINS,
    ENDS,
    GROUPS,
    NO_TOKENS,
    ROLLOUT,
    RUN,
    TRAINER,
    TRAJECTORIES,
    Class,
    Devices,
    Event,
    Recorded,
    TokenBooks,
)
from recipe.report.event_context import Context

logger = logging.getLogger(__name__)

OFF_BY = 0.005
"""Largest tolerated difference between a device's total time and the sum of its classes, as a share of the total time.

The two may differ, because they come from the clocks of two processes.
"""


class Kind(StrEnum):
    """The kinds of accelerator time: useful work, repeated work, and several kinds of lost time."""

    USEFUL = "useful"
    REPEATED = "repeated"
    WAITING = "waiting"
    IDLE = "idle"
    START_UP = "start_up"
    DOWN = "down"
    NOT_KNOWN = "not_known"


CLASSES: Mapping[Kind, tuple[Class, ...]] = {
    Kind.USEFUL: (Class.TRAINING, Class.LOG_PROBS, Class.DECODING, Class.PREFILL, Class.VALIDATING),
    Kind.REPEATED: (Class.RE_PREFILL, Class.RETRY, Class.LOST),
    Kind.IDLE: (Class.IDLE_PLACES,),
    Kind.START_UP: (Class.START_UP,),
    Kind.DOWN: (Class.DOWN,),
    Kind.NOT_KNOWN: (Class.NOT_KNOWN,),
}
KINDS: Mapping[Class, Kind] = {
    **{what: Kind.WAITING for what in Class if what.startswith("wait_")},
    **{what: kind for kind, classes in CLASSES.items() for what in classes},
}


@dataclass(frozen=True)
class DeviceAccount:
    """The time account of a device.

    Attributes:
        life: seconds from the device's start to its end.
        seconds: the seconds of `life` in each class.
        exceeds: seconds by which the sum of all classes exceeds `life`.
    """

    accelerators: int
    life: float
    seconds: Mapping[str, float]
    exceeds: float = 0.0

    @property
    def not_known(self) -> float:
        return self.seconds.get(Class.NOT_KNOWN, 0.0)

    @property
    def closes(self) -> bool:
        """Whether the seconds of all classes add up to ``life``, within the tolerance `OFF_BY`."""
        return abs(sum(self.seconds.values()) - self.life) <= OFF_BY * self.life and self.exceeds <= OFF_BY * self.life


@dataclass(frozen=True)
class Account:
    """The time account of a run of ``duration`` seconds. ``tokens`` is None if the token counts are not known."""

    duration: float
    devices: Mapping[str, DeviceAccount]
    tokens: TokenBooks | None = NO_TOKENS

    @property
    def closes(self) -> bool:
        tokens_close = self.tokens is not None and self.tokens.not_known == 0
        return tokens_close and all(device.closes for device in self.devices.values())

    @property
    def total(self) -> dict[str, float]:
        """Accelerator-seconds by class, summed over all devices."""
        sums: defaultdict[str, float] = defaultdict(float)
        for device in self.devices.values():
            for name, seconds in device.seconds.items():
                sums[name] += seconds * device.accelerators
        return dict(sums)

    def summary(self) -> dict[str, Any]:
        """Return the time account with the keys of ``summary.json``."""
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
    """An interval in which a share of a device's sequence slots (for the trainer: 1.0) was in one class of time."""

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
    """Return the time account of a run from 0 to ``until``, in seconds of the run's clock.

    ``events`` may be in any order, and events of trajectories and groups may be missing. ``found`` is the result of
    `pieces`; if it is None, `pieces` is called.
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
    """Yield the time of each device up to ``until``, as `Piece` objects.

    Start-up is included. Time whose class is not known is left out.
    """
    context = Context.of(events)
    lives = _lives(events, devices, until)
    starting = dict(lives)
    for event in sorted(events, key=lambda event: event.start):
        if event.lane not in lives or event.start >= until:
            continue
        if event.lane in starting:
            begins, _ = starting.pop(event.lane)
            yield Piece(event.lane, begins, min(event.start, until), Class.START_UP, 1.0)
        for start, end, what in context.during(event, min(event.end, until), devices.is_of_trainer(event.lane)):
            yield Piece(event.lane, start, end, what, event.share)
    for device, (begins, ends) in starting.items():
        yield Piece(device, begins, ends, Class.START_UP, 1.0)


def meanwhile(found: Iterable[Piece], devices: Devices) -> dict[Class, dict[Class, float]]:
    """Return the time that trainer and engines waited for each other, split by what the other side did meanwhile.

    The trainer's accelerator-seconds in `Class.WAIT_BATCH` are split by the classes in which the engines were at that
    time, as the mean over engines. The engines' accelerator-seconds in `Class.WAIT_GATE` and `Class.WAIT_TAIL` are
    split by the class in which the trainer was at that time.
    """
    by_side: dict[str, list[Piece]] = {TRAINER: [], ROLLOUT: []}
    for piece in found:
        if piece.end > piece.start:
            by_side.setdefault(piece.device.partition(" ")[0], []).append(piece)
    trainer, engines = by_side[TRAINER], by_side[ROLLOUT]
    replicas = len({piece.device for piece in engines}) or 1
    seconds = {Class.WAIT_BATCH: _beside(Class.WAIT_BATCH, trainer, engines, devices.size(TRAINER) / replicas)}
    return seconds | {
        what: _beside(what, engines, trainer, devices.size(ROLLOUT)) for what in (Class.WAIT_GATE, Class.WAIT_TAIL)
    }


def _beside(what: Class, waiting: Iterable[Piece], others: Sequence[Piece], each: float) -> dict[Class, float]:
    """Return in which classes ``others`` were while ``waiting`` was in class ``what``, in accelerator-seconds by class.

    A second in which one device of ``waiting`` was in ``what``, and one device of ``others`` was in class c, counts as
    ``each`` accelerator-seconds of c (times the shares of the two pieces).
    """
    changes: defaultdict[float, float] = defaultdict(float)
    for piece in waiting:
        if piece.what == what:
            changes[piece.start] += piece.share
            changes[piece.end] -= piece.share
    if not changes or not others:
        return {}
    times = np.array(sorted(changes))
    levels = np.cumsum([changes[time] for time in times])
    # For each of `times`, `sums` has the seconds in class `what` until then. Between two of these times they grow
    # linearly.
    sums = np.concatenate([[0.0], np.cumsum(levels[:-1] * np.diff(times))])
    spans = np.array([(other.start, other.end) for other in others])
    lengths = np.interp(spans[:, 1], times, sums) - np.interp(spans[:, 0], times, sums)
    found: defaultdict[Class, float] = defaultdict(float)
    for other, seconds in zip(others, lengths.tolist(), strict=True):
        found[other.what] += seconds * other.share * each
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def account_of(recorded: Recorded) -> Account:
    table = read(recorded.file).events
    many = pc.is_in(table["lane"], pa.array([TRAJECTORIES, GROUPS]))
    return close(events_of(table.filter(pc.invert(many))), recorded.devices, recorded.until, recorded.tokens)


def settled(recorded: Recorded) -> dict[str, Any]:
    """Return the time account for ``summary.json``. Log a warning if its seconds or its token counts do not add up."""
    account = account_of(recorded)
    if not account.closes:
        logger.warning("the account of the run does not close: %s", account.summary())
    return {**account.summary(), "events_lost": recorded.events_lost, "cpu_seconds": recorded.cpu_seconds}


def _lives(events: Iterable[Event], devices: Devices, until: float) -> dict[str, tuple[float, float]]:
    """Return (start, end) of the time in which each device belonged to the run, in seconds of the run's clock."""
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
    """Return the key by which devices are sorted: the trainer, then rollout engines by number, then the others."""
    kind, _, number = lane.partition(" ")
    return lane != TRAINER, kind != ROLLOUT, kind, int(number) if number.isdecimal() else 0

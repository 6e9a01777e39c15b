# SPDX-License-Identifier: Apache-2.0
"""The types of a run's event record: events, their lanes (one per component), classes of time and token counts.

Contract: a component reports an event by calling a function of the type `Tell`, which returns nothing. A component that
does one thing at a time uses a :class:`Lane`, whose events follow each other without a gap. One thread may change a
lane while another reads it. Clocks are passed in; they return seconds and never go backwards. docs/run-record.md
describes the lanes and their events. Shown by tests/core/test_events.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import NamedTuple

Clock = Callable[[], float]

TRAINER, SCHEDULER, RUN = "trainer", "scheduler", "run"
ROLLOUT, LOG_PROBS, AGENTS = "rollout", "log-probs", "agents"
TRAJECTORIES, GROUPS, WEIGHTS, TOKENS = "trajectories", "groups", "weights", "tokens"


class Event(NamedTuple):
    """One row of the event record. The meaning of a field depends on the event's lane (docs/run-record.md)."""

    lane: str
    what: str
    start: float
    end: float
    share: float = 1.0
    version: int | None = None
    group: int | None = None
    trajectory: int | None = None
    tokens: int | None = None
    text: str | None = None


Tell = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Do nothing with the event; this is the `Tell` of a run without an event record."""


class Class(StrEnum):
    """The classes into which the time account (`recipe.report.account`) divides the time of the accelerators."""

    TRAINING = "training"
    LOG_PROBS = "log_probs"
    DECODING = "decoding"
    PREFILL = "prefill"
    VALIDATING = "validating"
    RE_PREFILL = "re_prefill"
    RETRY = "retry"
    LOST = "lost_with_replica"
    WAIT_BATCH = "wait_batch"
    WAIT_REWARD = "wait_reward"
    WAIT_LOG_PROBS = "wait_log_probs"
    WAIT_DRIVER = "wait_driver"
    WAIT_WEIGHTS = "wait_weights"
    WAIT_GATE = "wait_gate"
    WAIT_TAIL = "wait_tail"
    WAIT_PROMPTS = "wait_prompts"
    WAIT_TOOLS = "wait_tools"
    WAIT_AGENTS = "wait_agents"
    WAIT_REQUESTS = "wait_requests"
    WAIT_VALIDATION = "wait_validation"
    WAIT_CHECKPOINT = "wait_checkpoint"
    WAIT_OTHER_SIDE = "wait_other_side"
    WAIT_SWITCH = "wait_switch"
    WAIT_END = "wait_end"
    IDLE_PLACES = "idle_places"
    START_UP = "start_up"
    DOWN = "down"
    NOT_KNOWN = "not_known"


SAMPLED = "sampled"
"""Name of the event on the lane `RUN` that has the number of tokens a rollout engine has sampled so far."""
EMPTY = "empty"
"""Activity of an engine that has no request. The scheduler's events at the same time say why."""


class Away(StrEnum):
    """What a trajectory does while it has no request at an engine, as recorded on the lane of its agent-loop worker."""

    TOOLS = "tools"
    REWARD = "reward"
    LOG_PROBS = "log_probs"


NOWHERE = "none"
"""Activity of an agent-loop worker while none of its trajectories does anything that `Away` lists."""


class Span(NamedTuple):
    """An event as a process reports it: without the name of its lane, and with times of the process's own clock.

    Attributes:
        what: the activity; for an engine, the class of its work.
        share: share of an engine's sequence slots that were in this class.
        tokens: number of tokens that an engine sampled in this class, or None if not counted. The first token of a
            request is counted in the class of the work before it, such as prefill.
    """

    what: str
    start: float
    end: float
    share: float = 1.0
    tokens: int | None = None


@dataclass(frozen=True)
class Activity:
    """The report of a process on what it did since its last report.

    Attributes:
        now: time of the report, in seconds of the process's clock.
        life: identifier that differs between a process and its replacement.
        tokens: the process's token counts so far, by name.
    """

    now: float
    life: str
    spans: list[Span]
    tokens: dict[str, int] = field(default_factory=dict)


class Lane:
    """Records the activity of a component that does one thing at a time. Any thread may call the methods."""

    def __init__(self, clock: Clock, what: str) -> None:
        self._clock, self._what, self._since = clock, what, clock()
        self._spans: list[Span] | None = None
        self._lock = Lock()

    @property
    def what(self) -> str:
        return self._what

    def turn_to(self, what: str) -> None:
        """Record that the component's activity is ``what`` from now on."""
        if what != self._what:
            with self._lock:
                self._cut()
                self._what = what

    def take(self) -> list[Span]:
        """Return the spans since the last call. Recording begins with the first call, which returns none."""
        with self._lock:
            self._cut()
            spans, self._spans = self._spans or [], []
        return spans

    def _cut(self) -> None:
        now = self._clock()
        if self._spans is not None and now > self._since:
            self._spans.append(Span(self._what, self._since, now))
        self._since = now


class Exchange(NamedTuple):
    """The three times, in seconds, of one exchange with another process, which is asked for the time of its clock.

    Attributes:
        asked, came: when the question was sent and when its answer arrived, by this process's clock.
        answered: when the other process answered, by its own clock.
    """

    asked: float
    answered: float
    came: float


class OtherClock:
    """Converts times of another process's clock to times of this process's clock.

    In an exchange, this process asks the other process for its time. The other process reads its clock between the
    sending of the question and the arrival of the answer, so each exchange gives bounds for the difference of the
    clocks. Both clocks are assumed to run at the same pace, so the difference is corrected only if it is outside the
    bounds of the latest exchange. If the clocks do run at the same pace, the error is at most the shortest round trip
    so far. Otherwise the error grows between exchanges, and each exchange reduces it to at most its own round trip.
    Converted times keep their order and have no gaps.
    """

    def __init__(self, first: Exchange) -> None:
        self._theirs = self._theirs_before = first.answered
        self._here = self._here_before = (first.asked + first.came) / 2

    def note(self, exchange: Exchange) -> None:
        """Update the estimated difference of the clocks with the latest ``exchange``.

        For times after it, `here` uses the new difference. For times between the previous exchange and this one, `here`
        interpolates between the old difference and the new one.
        """
        self._theirs_before, self._here_before = self._theirs, self._here
        guess = self._here + exchange.answered - self._theirs
        self._theirs = exchange.answered
        # Converted times never go backwards.
        self._here = max(self._here_before, min(max(guess, exchange.asked), exchange.came))

    def here(self, theirs: float) -> float:
        """Return what this process's clock showed when the other process's clock showed ``theirs``."""
        if theirs <= self._theirs_before:
            return self._here_before - (self._theirs_before - theirs)
        if theirs >= self._theirs:
            return self._here + theirs - self._theirs
        share = (theirs - self._theirs_before) / (self._theirs - self._theirs_before)
        return self._here_before + share * (self._here - self._here_before)


RECORDED = "recorded"
"""Key of the `Recorded` object in the state that the trainer reports."""
SCORES = "scores"
"""Phase of the trainer's timeline in which the trainer waits for log-prob servers."""
SWITCH = "switch"
"""Phase of the trainer's timeline in which replicas on its accelerators wake or go back to sleep."""
BEGINS, ENDS, LOST, JOINED = "begins", "ends", "lost", "joined"
"""Events on the lane `RUN`. The device named in ``text`` began after the run's begin, ended before its end, was lost,
or has joined the run as a replacement."""


@dataclass(frozen=True)
class Devices:
    """The devices in the time account (`recipe.report.account`): the trainer, rollout engines and log-prob servers.

    Attributes:
        accelerators: number of accelerators of one device, by the first word of the device's lane, such as "rollout".
        shared: whether all replicas are on the trainer's accelerators.
        hybrid: number of replicas on the trainer's accelerators if other replicas have their own, otherwise 0. These
            hybrid replicas have the lowest numbers.

    Accelerators that the trainer shares with a replica are counted as the replica's device, not as the trainer's.
    """

    accelerators: Mapping[str, int]
    shared: bool = False
    hybrid: int = 0

    def counts(self, lane: str) -> bool:
        """Return whether the time account includes the component that reports on this lane (row of the timeline)."""
        kind = lane.partition(" ")[0]
        return kind in (ROLLOUT, LOG_PROBS) or (lane == TRAINER and not (self.shared or self.hybrid))

    def is_of_trainer(self, lane: str) -> bool:
        """Return whether ``lane`` is the lane of a replica on the trainer's accelerators."""
        kind, _, number = lane.partition(" ")
        return kind == ROLLOUT and (self.shared or (number.isdecimal() and int(number) < self.hybrid))

    def size(self, lane: str) -> int:
        """Return the number of accelerators of the device with this lane. At any time they all do the same thing."""
        return int(self.accelerators.get(lane.partition(" ")[0], 1))


@dataclass(frozen=True)
class TokenBooks:
    """Numbers of tokens sampled for training since this launch of the run, grouped by what became of them.

    Attributes:
        sampled: tokens sampled, by the engines' own counts.
        restored: tokens restored from a checkpoint.
        trained, filtered, failed: tokens in answers of prompt groups that ended in this state.
        cut: tokens that were discarded: by a retry, by the end of a request, or by an agent loop.
        in_flight: tokens in prompt groups that have not ended.
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
        """The number of tokens not accounted for (it may be negative): `sampled` + `restored` - all other counts."""
        ended = self.trained + self.filtered + self.failed + self.cut + self.in_flight
        return self.sampled + self.restored - ended


NO_TOKENS = TokenBooks()


@dataclass(frozen=True)
class Recorded:
    """The event record of a run that has ended.

    Attributes:
        until: end of the record, in seconds since the run began.
        tokens: the final token counts, or None if they are not known because a process did not report its counts.
        events_lost: number of events that could not be written.
        cpu_seconds: CPU seconds of the thread that wrote the record.
    """

    file: Path
    devices: Devices
    until: float
    tokens: TokenBooks | None
    events_lost: int
    cpu_seconds: float

# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a run's record: what is told of its parts, from when to when, and what a process answers of itself.

Contract: whoever does something tells a `Tell` of it and reads nothing back; no decision imports this. A part that does
one thing at a time (:class:`Lane`) leaves events that follow each other without a gap. The clock is passed in: seconds,
never backwards. Lanes, and what happens on them: docs/run-record.md. Shown by tests/core/test_events.py.

Plain state; a lane may be told and asked on different threads.
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
    """A row of the record; docs/run-record.md has the meaning of each field by lane."""

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
    """Where no record is written."""


class Class(StrEnum):
    """What an accelerator's second was, for `recipe.report.account`."""

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
    WAIT_END = "wait_end"
    IDLE_PLACES = "idle_places"
    START_UP = "start_up"
    DOWN = "down"
    NOT_KNOWN = "not_known"


SAMPLED = "sampled"
"""On the lane `RUN`: how many tokens a rollout engine has sampled so far."""
EMPTY = "empty"
"""An engine without a request; why, the scheduler knows."""


class Away(StrEnum):
    """What a trajectory is at when it is at no engine: what happens on the lane of an agent-loop worker."""

    TOOLS = "tools"
    REWARD = "reward"
    LOG_PROBS = "log_probs"


NOWHERE = "none"
"""On the lane of an agent-loop worker: none of its trajectories is away."""


class Span(NamedTuple):
    """An event of a process that does not know its lane's name; times by its own clock.

    tokens: of an engine: those that it sampled so, a request's first one with what came before it; None if it is not
    told.
    """

    what: str
    start: float
    end: float
    share: float = 1.0
    tokens: int | None = None


@dataclass(frozen=True)
class Activity:
    """What a process did since it was last asked, and its clock when it answered.

    life: differs between a process and the one in its place. tokens: counts of its life so far, by name.
    """

    now: float
    life: str
    spans: list[Span]
    tokens: dict[str, int] = field(default_factory=dict)


class Lane:
    """A part that does one thing at a time, ``what`` from its construction on; it keeps nothing until it is asked.

    Callable from any thread.
    """

    def __init__(self, clock: Clock, what: str) -> None:
        self._clock, self._what, self._since = clock, what, clock()
        self._spans: list[Span] | None = None
        self._lock = Lock()

    @property
    def what(self) -> str:
        """What it does now."""
        return self._what

    def turn_to(self, what: str) -> None:
        """Do this from now on."""
        if what != self._what:
            with self._lock:
                self._cut()
                self._what = what

    def take(self) -> list[Span]:
        """The spans from the last time that this was asked up to now; none the first time."""
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
    """A question, by this process's clock ``asked`` and ``came``; the other's clock when it answered."""

    asked: float
    answered: float
    came: float


class OtherClock:
    """The time of another process in this one's, from questions that it answered with its clock.

    The answer was made between the question and its arrival, so that each exchange bounds the difference of the two
    clocks. Times are mapped without a gap and in their order: the clock of the other is followed from one exchange to
    the next, and corrected only where it has left the bounds. With clocks of the same pace the error is at most the
    round trip of the quickest exchange so far, whatever the difference of the two is; a pace that differs is followed.
    """

    def __init__(self, first: Exchange) -> None:
        self._theirs = self._theirs_before = first.answered
        self._here = self._here_before = (first.asked + first.came) / 2

    def note(self, exchange: Exchange) -> None:
        """Another exchange; from now on times are mapped up to it."""
        self._theirs_before, self._here_before = self._theirs, self._here
        guess = self._here + exchange.answered - self._theirs
        self._theirs = exchange.answered
        # Not before what has been mapped: no time is given twice.
        self._here = max(self._here_before, min(max(guess, exchange.asked), exchange.came))

    def here(self, theirs: float) -> float:
        """This process's time at the other's ``theirs``."""
        if theirs <= self._theirs_before:
            return self._here_before - (self._theirs_before - theirs)
        if theirs >= self._theirs:
            return self._here + theirs - self._theirs
        share = (theirs - self._theirs_before) / (self._theirs - self._theirs_before)
        return self._here_before + share * (self._here - self._here_before)


RECORDED = "recorded"
"""Where the trainer's state has the `Recorded`, for whoever writes the summary."""
SCORES = "scores"
"""A phase of the trainer's timeline: it waits for log-prob servers."""
BEGINS, ENDS, LOST, JOINED = "begins", "ends", "lost", "joined"
"""On the run's lane, of the device that `text` names: its life begins later than the run, or ends before it; it died,
or came in a lost one's place.
"""


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
class Recorded:
    """The record of a run that has ended.

    file: its events. until: seconds of the run's clock that it covers. tokens: None if nobody could say. events_lost:
    events that could not be written. cpu_seconds: of the thread that wrote it.
    """

    file: Path
    devices: Devices
    until: float
    tokens: TokenBooks | None
    events_lost: int
    cpu_seconds: float

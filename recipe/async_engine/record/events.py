# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a run's record: the events, and what a process answers when it is asked what it did.

Contract: each part reports what it does to a `Tell` and reads nothing back, and no decision imports this module. A part
that does one thing at a time (:class:`Lane`) leaves events that follow each other without a gap. The clock is passed
in; it gives seconds and never goes backwards. docs/run-record.md describes the lanes and their events. Shown by
tests/core/test_events.py.

The classes hold plain state. A lane may be changed and read on different threads.
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
    """A row of the record. docs/run-record.md has the meaning of each field by lane."""

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
    """Drop the event, because no record is written."""


class Class(StrEnum):
    """The classes of an accelerator's time, for `recipe.report.account`."""

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
"""An event on the lane `RUN`: how many tokens a rollout engine has sampled so far."""
EMPTY = "empty"
"""An engine has no request. The scheduler's lane says why."""


class Away(StrEnum):
    """What a trajectory does while it is at no engine, as shown on the lane of an agent-loop worker."""

    TOOLS = "tools"
    REWARD = "reward"
    LOG_PROBS = "log_probs"


NOWHERE = "none"
"""An event on the lane of an agent-loop worker: none of its trajectories is outside of an engine."""


class Span(NamedTuple):
    """An event of a process that does not know its lane's name, with times of its own clock.

    Attributes:
        tokens: tokens that an engine sampled in this way. A request's first token counts with the work before it. None
            if they are not counted.
    """

    what: str
    start: float
    end: float
    share: float = 1.0
    tokens: int | None = None


@dataclass(frozen=True)
class Activity:
    """What a process did since it was last asked.

    Attributes:
        now: its clock when it answered.
        life: differs between a process and its replacement.
        spans: what it did.
        tokens: its token counts so far, by name.
    """

    now: float
    life: str
    spans: list[Span]
    tokens: dict[str, int] = field(default_factory=dict)


class Lane:
    """A part that does one thing at a time. It keeps no spans before the first question. Any thread may call it."""

    def __init__(self, clock: Clock, what: str) -> None:
        self._clock, self._what, self._since = clock, what, clock()
        self._spans: list[Span] | None = None
        self._lock = Lock()

    @property
    def what(self) -> str:
        """What the part does now."""
        return self._what

    def turn_to(self, what: str) -> None:
        """Note that the part does this from now on."""
        if what != self._what:
            with self._lock:
                self._cut()
                self._what = what

    def take(self) -> list[Span]:
        """Return the spans since the last call, or none at the first call."""
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
    """A question to another process.

    Attributes:
        asked, came: when it was asked and when its answer came, by this process's clock.
        answered: when it was answered, by the other's clock.
    """

    asked: float
    answered: float
    came: float


class OtherClock:
    """Maps the times of another process to this one's clock, by questions that the other answered with its time.

    The answer was given between the question and its arrival, so each exchange bounds the difference of the two clocks.
    Times are mapped without gaps and in order. The other's clock is followed from one exchange to the next, and is
    corrected only when it has left the bounds. For clocks of the same pace the error is at most the shortest round trip
    so far. A clock with another pace is followed too.
    """

    def __init__(self, first: Exchange) -> None:
        self._theirs = self._theirs_before = first.answered
        self._here = self._here_before = (first.asked + first.came) / 2

    def note(self, exchange: Exchange) -> None:
        """Take in another exchange, up to which times are mapped from now on."""
        self._theirs_before, self._here_before = self._theirs, self._here
        guess = self._here + exchange.answered - self._theirs
        self._theirs = exchange.answered
        # Never go back behind a time that was given already.
        self._here = max(self._here_before, min(max(guess, exchange.asked), exchange.came))

    def here(self, theirs: float) -> float:
        """Return this process's time at the other's time ``theirs``."""
        if theirs <= self._theirs_before:
            return self._here_before - (self._theirs_before - theirs)
        if theirs >= self._theirs:
            return self._here + theirs - self._theirs
        share = (theirs - self._theirs_before) / (self._theirs - self._theirs_before)
        return self._here_before + share * (self._here - self._here_before)


RECORDED = "recorded"
"""The key of the `Recorded` in the trainer's state, which the writer of the summary reads."""
SCORES = "scores"
"""The phase of the trainer's timeline in which it waits for log-prob servers."""
BEGINS, ENDS, LOST, JOINED = "begins", "ends", "lost", "joined"
"""Events on the run's lane about the device that `text` names: it begins later than the run, ends earlier, was lost,
or replaced a lost one.
"""


@dataclass(frozen=True)
class Devices:
    """The devices of a run's account.

    Attributes:
        accelerators: the accelerators of one device, by the first word of its lane.
        shared: whether training and generation use the same accelerators.
    """

    accelerators: Mapping[str, int]
    shared: bool = False

    def counts(self, lane: str) -> bool:
        """Return whether this lane is a device of the account."""
        kind = lane.partition(" ")[0]
        return kind in (ROLLOUT, LOG_PROBS) or (lane == TRAINER and not self.shared)

    def size(self, lane: str) -> int:
        """Return the number of accelerators of a device, which all do the same at any moment."""
        return int(self.accelerators.get(lane.partition(" ")[0], 1))


@dataclass(frozen=True)
class TokenBooks:
    """What became of every token that an engine sampled for training since this start of the run.

    Attributes:
        sampled: tokens by the engines' own counts.
        restored: tokens of a checkpoint.
        trained, filtered, failed: tokens in answers of groups that ended in this way.
        cut: tokens that retries, ended requests or agent loops threw away.
        in_flight: tokens in groups that had not ended.
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
        """The tokens that no class has. It is negative if more tokens came out than went in."""
        ended = self.trained + self.filtered + self.failed + self.cut + self.in_flight
        return self.sampled + self.restored - ended


NO_TOKENS = TokenBooks()


@dataclass(frozen=True)
class Recorded:
    """The record of a run that has ended.

    Attributes:
        file: the file of events.
        devices: the devices of the account.
        until: the seconds of the run that it covers.
        tokens: the token books. None if they could not be closed.
        events_lost: events that could not be written.
        cpu_seconds: CPU time of the thread that wrote the record.
    """

    file: Path
    devices: Devices
    until: float
    tokens: TokenBooks | None
    events_lost: int
    cpu_seconds: float

# SPDX-License-Identifier: Apache-2.0
"""Measures what a process that serves trajectories does: a rollout engine, or an agent-loop worker.

Contract: an engine works on several requests at once. For each stretch of time it leaves one span for each class of
work, with that class's share of the engine's places. The shares add up to 1. Nothing is kept before the first question.
The clock is passed in; it gives seconds and never goes backwards. Shown by tests/core/test_events.py.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from recipe.async_engine.record.events import EMPTY, NOWHERE, Away, Class, Clock, Lane, Span


class Work(StrEnum):
    """The purpose of a request to an engine.

    NEW: its tokens have not been computed before. AGAIN: a part of it was answered before and is computed again. RETRY:
    an earlier attempt failed. VALIDATION: it is not trained. OTHER: it does not come from this run's agent loops.
    """

    NEW = "new"
    AGAIN = "again"
    RETRY = "retry"
    VALIDATION = "validation"
    OTHER = "other"


OF_ITS_OWN = {Work.RETRY: Class.RETRY, Work.VALIDATION: Class.VALIDATING}
"""Work that counts as one class from a request's arrival to its end. Other work changes class at the first token."""
TRAINED_WORK = (Work.NEW, Work.AGAIN, Work.RETRY)


class AwayActivity:
    """Records what the trajectories of an agent-loop worker do outside of engines. One event loop calls it.

    Attributes:
        lane: names everything that at least one trajectory is doing, joined by "+".
        goes_on: for each agent loop that has ended once, whether its trajectories continue after an answer. A loop
            whose trajectories do not has no tools, so the time after its answer is not tool time.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lane = Lane(clock, NOWHERE)
        self._at: Counter[Away] = Counter()
        self.goes_on: dict[str, bool] = {}

    def tool_time(self, loop: str) -> "ToolTime":
        """Return the tool time of a new trajectory, for the agent loop with this name."""
        return ToolTime(self, loop)

    def change(self, what: Away, by: int) -> None:
        """Note that ``by`` more trajectories do this from now on."""
        self._at[what] += by
        self.lane.turn_to("+".join(name for name in Away if self._at[name] > 0) or NOWHERE)

    @contextmanager
    def at(self, what: Away) -> Iterator[None]:
        """Note that a trajectory does this inside the ``with`` block."""
        self.change(what, 1)
        try:
            yield
        finally:
            self.change(what, -1)


class ToolTime:
    """Measures how long one trajectory is in its tools: from an answer to its next request.

    Attributes:
        seconds: the time so far, without the present stay in a tool.
    """

    def __init__(self, activity: AwayActivity | None = None, loop: str = "") -> None:
        self._activity, self._loop, self.seconds = activity, loop, 0.0
        self._requests, self._since = 0, 0.0
        self._is_between = self._is_in = False

    def asks(self) -> None:
        """Note that a request begins."""
        if self._activity is not None and self._is_between:
            self.seconds += self._activity.clock() - self._since
            self._activity.goes_on[self._loop] = True
        self.leave()
        self._requests += 1

    def is_answered(self) -> None:
        """Note that a request has its whole answer. Without another request the trajectory is in a tool now."""
        self._requests -= 1
        if self._activity is None or self._requests > 0:
            return
        self._is_between, self._since = True, self._activity.clock()
        if self._activity.goes_on.get(self._loop, True):
            self._activity.change(Away.TOOLS, 1)
            self._is_in = True

    def end(self) -> None:
        """Note that the trajectory has ended, so that it was in no tool after its last answer."""
        if self._activity is not None:
            self._activity.goes_on.setdefault(self._loop, False)
        self.leave()

    def leave(self) -> None:
        """Note that the trajectory is in no tool any more, however it continues."""
        self._is_between = False
        if self._activity is not None and self._is_in:
            self._activity.change(Away.TOOLS, -1)
            self._is_in = False


@dataclass
class _Request:
    work: Work
    tokens: int = 0
    answers: bool = False

    @property
    def kind(self) -> Class:
        if self.work in OF_ITS_OWN:
            return OF_ITS_OWN[self.work]
        if self.answers:
            return Class.DECODING
        return Class.RE_PREFILL if self.work is Work.AGAIN else Class.PREFILL


class EngineActivity:
    """Records what a rollout engine used its places for while it served, and why it did not serve.

    It keeps counts from the beginning, and spans from the first question on.

    Args:
        clock: the clock.
        places: requests for which the engine generates at once.

    Attributes:
        sampled: tokens so far of requests that are trained.
        answered: the tokens among them with which a request was answered.
    """

    def __init__(self, clock: Clock, places: int) -> None:
        self._clock, self._places, self._since = clock, max(1, places), clock()
        self._begun = self._since
        self._closed: Class | None = Class.START_UP
        self._told: dict[str, Work] = {}
        self._requests: dict[str, _Request] = {}
        # Requests with a token, which occupy a place, and requests without one.
        self._kinds: dict[bool, Counter[Class]] = {True: Counter(), False: Counter()}
        self._used: dict[str, float] = {}
        self._tokens: Counter[str] = Counter()
        self._spans: list[Span] | None = None
        self.sampled = self.answered = 0

    def close(self, why: Class) -> None:
        """Note that the engine serves nothing from now on."""
        if self._closed is not why:
            self._cut()
            self._closed = why

    def open(self) -> None:
        """Note that the engine serves from now on."""
        if self._closed is not None:
            self._cut()
            self._closed = None

    def expect(self, name: str, work: Work) -> None:
        """Note the purpose of a request that may come. Without this note it is `Work.OTHER`."""
        self._told[name] = work

    def answer(self, name: str, tokens: int) -> None:
        """Note that the request was answered with so many tokens."""
        if self._told.get(name, Work.OTHER) in TRAINED_WORK:
            self.answered += tokens

    @property
    def under_way(self) -> int:
        """The part of `sampled` that belongs to requests at the engine now."""
        return sum(request.tokens for request in self._requests.values() if request.work in TRAINED_WORK)

    def forget(self, name: str) -> None:
        """Note that the request is over, whether or not it reached the engine."""
        self._told.pop(name, None)

    def enter(self, name: str) -> None:
        """Note that the request is at the engine."""
        if self._requests:
            self._advance()
        else:
            self._cut()
        request = self._requests[name] = _Request(self._told.get(name, Work.OTHER))
        self._kinds[request.answers][request.kind] += 1

    def output(self, name: str, tokens: int) -> None:
        """Note that the engine has sampled so many tokens for the request in total."""
        request = self._requests[name]
        if (new := tokens - request.tokens) <= 0:
            return  # the last output of a cut request has no new token
        if request.work in TRAINED_WORK:
            self.sampled += new
        request.tokens = tokens
        if not request.answers:
            self._tokens[request.kind] += 1
            new -= 1
            self._turn(request, answers=True)
        self._tokens[request.kind] += new

    def recompute(self, names: Iterable[str]) -> None:
        """Note that the engine computes the tokens of these requests again before their next token."""
        for request in (self._requests[name] for name in names if name in self._requests):
            if request.work is Work.NEW:
                self._turn(request, answers=request.answers, work=Work.AGAIN)
            self._turn(request, answers=False)

    def leave(self, name: str) -> None:
        """Note that the request has left the engine."""
        if len(self._requests) > 1:
            self._advance()
        else:
            self._cut()
        request = self._requests.pop(name)
        self._kinds[request.answers][request.kind] -= 1

    def take(self) -> list[Span]:
        """Return the spans since the last call, or none at the first call."""
        self._cut()
        spans, self._spans = self._spans or [], []
        return spans

    def _turn(self, request: _Request, answers: bool, work: Work | None = None) -> None:
        self._advance()
        self._kinds[request.answers][request.kind] -= 1
        request.answers, request.work = answers, work or request.work
        self._kinds[request.answers][request.kind] += 1

    def _advance(self) -> None:
        """Account for the time up to now, in which nothing changed."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        if seconds <= 0:
            return
        if self._closed is not None:
            self._use(self._closed, seconds)
        elif not self._requests:
            self._use(EMPTY, seconds)
        else:
            answering = self._kinds[True].total()
            waiting = len(self._requests) - answering
            places = max(answering, self._places)
            # The other requests without a token wait in the engine's queue.
            entered = min(waiting, places - answering)
            for answers, part in ((True, 1.0), (False, entered / max(1, waiting))):
                for kind, count in self._kinds[answers].items():
                    if count:
                        self._use(kind, seconds * count * part / places)
            if answering + entered < places:
                self._use(Class.IDLE_PLACES, seconds * (places - answering - entered) / places)

    def _use(self, what: str, seconds: float) -> None:
        self._used[what] = self._used.get(what, 0.0) + seconds

    def _cut(self) -> None:
        """End the present stretch of time."""
        self._advance()
        length = self._since - self._begun
        if length <= 0:
            return
        if self._spans is not None:
            sampled = {what: 0.0 for what, tokens in self._tokens.items() if tokens}
            self._spans += [
                Span(what, self._begun, self._since, used / length, self._tokens[what] or None)
                for what, used in (sampled | self._used).items()
            ]
        self._begun = self._since
        self._used = {}
        self._tokens.clear()

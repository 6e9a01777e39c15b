# SPDX-License-Identifier: Apache-2.0
"""Measures what a process that serves trajectories does: a rollout engine, or an agent-loop worker.

Contract: an engine works on several requests at once. For each interval it records one span per class of work, with the
share of the engine's sequence slots that the class used; the shares of an interval add up to 1. Spans are kept only
from the first call of ``take`` on. The clock is passed in; it returns seconds and never goes backwards. Shown by
tests/core/test_events.py.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from recipe.async_engine.record.events import EMPTY, NOWHERE, Away, Class, Clock, Lane, Span


class Work(StrEnum):
    """The purpose of a request to an engine.

    NEW: the answer has not been generated before. AGAIN: a part of the answer was generated before and is computed
    again. RETRY: an earlier attempt of the trajectory failed. VALIDATION: the answer is not trained on. OTHER: the
    request does not come from this run's agent loops.
    """

    NEW = "new"
    AGAIN = "again"
    RETRY = "retry"
    VALIDATION = "validation"
    OTHER = "other"


OF_ITS_OWN = {Work.RETRY: Class.RETRY, Work.VALIDATION: Class.VALIDATING}
"""Work that counts as one class from a request's arrival to its end. Other work changes class at its first token."""
TRAINED_WORK = (Work.NEW, Work.AGAIN, Work.RETRY)


class AwayActivity:
    """Records what the trajectories of one agent-loop worker do while not at an engine. One event loop calls it.

    Attributes:
        lane: the activities that at least one trajectory is in, joined by "+".
        goes_on: for each agent loop of which a trajectory has ended, whether its trajectories send another request
            after an answer. If they do not, the loop uses no tools, so the time after an answer is not tool time.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lane = Lane(clock, NOWHERE)
        self._at: Counter[Away] = Counter()
        self.goes_on: dict[str, bool] = {}

    def tool_time(self, loop: str) -> "ToolTime":
        """Return the tool-time meter of a new trajectory of the agent loop named ``loop``."""
        return ToolTime(self, loop)

    def change(self, what: Away, by: int) -> None:
        """Record that ``by`` more trajectories are in activity ``what`` from now on."""
        self._at[what] += by
        self.lane.turn_to("+".join(name for name in Away if self._at[name] > 0) or NOWHERE)

    @contextmanager
    def at(self, what: Away) -> Iterator[None]:
        """Record that one trajectory is in activity ``what`` inside the ``with`` block."""
        self.change(what, 1)
        try:
            yield
        finally:
            self.change(what, -1)


class ToolTime:
    """Measures how long one trajectory spends in tools: the time from each answer to the trajectory's next request.

    Attributes:
        seconds: tool time so far, without the current tool call.
    """

    def __init__(self, activity: AwayActivity | None = None, loop: str = "") -> None:
        self._activity, self._loop, self.seconds = activity, loop, 0.0
        self._requests, self._since = 0, 0.0
        self._is_between = self._is_in = False

    def asks(self) -> None:
        """Record that the trajectory sends a request."""
        if self._activity is not None and self._is_between:
            self.seconds += self._activity.clock() - self._since
            self._activity.goes_on[self._loop] = True
        self.leave()
        self._requests += 1

    def is_answered(self) -> None:
        """Record that a request was answered; if it was the trajectory's only open one, a tool call begins."""
        self._requests -= 1
        if self._activity is None or self._requests > 0:
            return
        self._is_between, self._since = True, self._activity.clock()
        if self._activity.goes_on.get(self._loop, True):
            self._activity.change(Away.TOOLS, 1)
            self._is_in = True

    def end(self) -> None:
        """Record that the trajectory has ended, so the time since its last answer is not tool time."""
        if self._activity is not None:
            self._activity.goes_on.setdefault(self._loop, False)
        self.leave()

    def leave(self) -> None:
        """Record that the trajectory is no longer in a tool."""
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
    """Records which work used a rollout engine's sequence slots while it served requests, and why it did not serve.

    Token counts run from construction, spans from the first call of `take`.

    Args:
        places: number of requests that the engine can run at once.

    Attributes:
        sampled: number of tokens sampled so far for requests whose answers are trained on.
        answered: number of these tokens that were returned in answers.
    """

    def __init__(self, clock: Clock, places: int) -> None:
        self._clock, self._places, self._since = clock, max(1, places), clock()
        self._begun = self._since
        self._closed: Class | None = Class.START_UP
        self._told: dict[str, Work] = {}
        self._requests: dict[str, _Request] = {}
        # Number of requests by class: under True those that decode, and so hold a slot, under False those in prefill.
        self._kinds: dict[bool, Counter[Class]] = {True: Counter(), False: Counter()}
        self._used: dict[str, float] = {}
        self._tokens: Counter[str] = Counter()
        self._spans: list[Span] | None = None
        self.sampled = self.answered = 0

    def close(self, why: Class) -> None:
        """Record that the engine serves no requests from now on, for the reason ``why``."""
        if self._closed is not why:
            self._cut()
            self._closed = why

    def open(self) -> None:
        """Record that the engine serves requests from now on."""
        if self._closed is not None:
            self._cut()
            self._closed = None

    def expect(self, name: str, work: Work) -> None:
        """Record the purpose of a request that may come. Requests of unknown purpose count as `Work.OTHER`."""
        self._told[name] = work

    def answer(self, name: str, tokens: int) -> None:
        """Record that a request was answered with ``tokens`` tokens."""
        if self._told.get(name, Work.OTHER) in TRAINED_WORK:
            self.answered += tokens

    @property
    def under_way(self) -> int:
        """Return how many of the `sampled` tokens belong to requests that are at the engine now."""
        return sum(request.tokens for request in self._requests.values() if request.work in TRAINED_WORK)

    def forget(self, name: str) -> None:
        """Record that a request is over, whether or not it reached the engine."""
        self._told.pop(name, None)

    def enter(self, name: str) -> None:
        """Record that a request has reached the engine."""
        if self._requests:
            self._advance()
        else:
            self._cut()
        request = self._requests[name] = _Request(self._told.get(name, Work.OTHER))
        self._kinds[request.answers][request.kind] += 1

    def output(self, name: str, tokens: int) -> None:
        """Record that the engine has sampled ``tokens`` tokens in total for a request."""
        request = self._requests[name]
        if (new := tokens - request.tokens) <= 0:
            return  # the last output of an interrupted request has no new token
        if request.work in TRAINED_WORK:
            self.sampled += new
        request.tokens = tokens
        if not request.answers:
            self._tokens[request.kind] += 1
            new -= 1
            self._turn(request, answers=True)
        self._tokens[request.kind] += new

    def recompute(self, names: Iterable[str]) -> None:
        """Record that the engine must compute the tokens of these requests again before it samples their next token."""
        for request in (self._requests[name] for name in names if name in self._requests):
            if request.work is Work.NEW:
                self._turn(request, answers=request.answers, work=Work.AGAIN)
            self._turn(request, answers=False)

    def leave(self, name: str) -> None:
        """Record that a request has left the engine."""
        if len(self._requests) > 1:
            self._advance()
        else:
            self._cut()
        request = self._requests.pop(name)
        self._kinds[request.answers][request.kind] -= 1

    def take(self) -> list[Span]:
        """Return the spans since the last call. The first call returns none and starts recording them."""
        self._cut()
        spans, self._spans = self._spans or [], []
        return spans

    def _turn(self, request: _Request, answers: bool, work: Work | None = None) -> None:
        self._advance()
        self._kinds[request.answers][request.kind] -= 1
        request.answers, request.work = answers, work or request.work
        self._kinds[request.answers][request.kind] += 1

    def _advance(self) -> None:
        """Divide the time since the last change among the classes of the present requests."""
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
            # Requests in prefill for which no slot is free wait in the engine's queue.
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
        """End the present interval, and record its spans if `take` has been called."""
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

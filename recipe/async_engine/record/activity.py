# SPDX-License-Identifier: Apache-2.0
"""Measures how a rollout engine or an agent-loop worker spends its time.

Contract: an engine works on several requests at once. For each interval, `EngineActivity` records one `Span` per class
of work (`events.Class`, such as decoding), with the share of the engine's sequence slots that the class used; the
shares of an interval add up to 1. Spans are recorded from the first call of ``take`` on. The clock is passed in; it
returns seconds and never goes backwards. Shown by tests/core/test_events.py.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from recipe.async_engine.record.events import EMPTY, NOWHERE, Away, Class, Clock, Lane, Span


class Work(StrEnum):
    """The purpose of a request to an engine.

    NEW: generate an answer from its first token on. AGAIN: continue an answer whose earlier part is prefilled again.
    RETRY: generate an answer again after an earlier attempt failed. VALIDATION: generate an answer that is not trained
    on. OTHER: the request does not come from this run's agent loops.
    """

    NEW = "new"
    AGAIN = "again"
    RETRY = "retry"
    VALIDATION = "validation"
    OTHER = "other"


OF_ITS_OWN = {Work.RETRY: Class.RETRY, Work.VALIDATION: Class.VALIDATING}
"""For a request with one of these purposes, the class to which all of its time belongs. Other requests count as prefill
first, then as decoding."""
TRAINED_WORK = (Work.NEW, Work.AGAIN, Work.RETRY)


class AwayActivity:
    """Records what an agent-loop worker's trajectories do between requests. Only the worker's event loop may use it.

    Attributes:
        lane: the `Lane` of what the worker's trajectories do. Its state is the names of the activities in which there
            is a trajectory, joined by "+".
        goes_on: a key is the name of an agent loop; its value is whether a trajectory of this loop has sent a further
            request after an answer. If none has, the loop uses no tools, and the time after an answer is not tool time.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lane = Lane(clock, NOWHERE)
        self._at: Counter[Away] = Counter()
        self.goes_on: dict[str, bool] = {}

    def tool_time(self, loop: str) -> "ToolTime":
        return ToolTime(self, loop)

    def change(self, what: Away, by: int) -> None:
        """Record that the number of trajectories in activity ``what`` changes by ``by``."""
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
    """Measures how many `seconds` one trajectory has spent in tools: from each answer to the next request."""

    def __init__(self, activity: AwayActivity | None = None, loop: str = "") -> None:
        self._activity, self._loop, self.seconds = activity, loop, 0.0
        self._requests, self._since = 0, 0.0
        self._is_between = self._is_in = False

    def asks(self) -> None:
        if self._activity is not None and self._is_between:
            self.seconds += self._activity.clock() - self._since
            self._activity.goes_on[self._loop] = True
        self.leave()
        self._requests += 1

    def is_answered(self) -> None:
        """Record that a request was answered. If the trajectory has no other open request, a tool call begins."""
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
    """Records what a rollout engine's sequence slots were used for, and why the engine served no requests.

    The engine can run ``places`` requests at once. Tokens are counted from construction on, but spans are recorded only
    from the first call of `take` on.

    Attributes:
        sampled: number of tokens sampled so far for requests whose answers are trained on.
        answered: number of those tokens that were returned in answers.
    """

    def __init__(self, clock: Clock, places: int) -> None:
        self._clock, self._places, self._since = clock, max(1, places), clock()
        self._begun = self._since
        self._closed: Class | None = Class.START_UP
        self._told: dict[str, Work] = {}
        self._requests: dict[str, _Request] = {}
        # Numbers of requests by class. Requests that decode, and so hold a slot, are under the key True, others under
        # False.
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
        """Record the purpose of a request before it arrives. Without this call, the request counts as `Work.OTHER`."""
        self._told[name] = work

    def answer(self, name: str, tokens: int) -> None:
        """Record that a request was answered with ``tokens`` tokens."""
        if self._told.get(name, Work.OTHER) in TRAINED_WORK:
            self.answered += tokens

    @property
    def under_way(self) -> int:
        """The number of tokens in `sampled` that belong to requests which are at the engine now."""
        return sum(request.tokens for request in self._requests.values() if request.work in TRAINED_WORK)

    def forget(self, name: str) -> None:
        """Record that a request is over; it may never have reached the engine."""
        self._told.pop(name, None)

    def enter(self, name: str) -> None:
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
            return  # There is nothing to count: the last output of an interrupted request has no new token.
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
        if len(self._requests) > 1:
            self._advance()
        else:
            self._cut()
        request = self._requests.pop(name)
        self._kinds[request.answers][request.kind] -= 1

    def take(self) -> list[Span]:
        """Return the spans recorded since the last call. The first call returns none and starts the recording."""
        self._cut()
        spans, self._spans = self._spans or [], []
        return spans

    def _turn(self, request: _Request, answers: bool, work: Work | None = None) -> None:
        self._advance()
        self._kinds[request.answers][request.kind] -= 1
        request.answers, request.work = answers, work or request.work
        self._kinds[request.answers][request.kind] += 1

    def _advance(self) -> None:
        """Divide the time since the last change among the classes of work that the engine does now.

        Each class gets a part in proportion to the number of sequence slots that its requests hold.
        """
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
            # Requests in prefill for which no slot is free are in the engine's queue, and use no slot.
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
        """End the current interval, and record its spans if `take` has been called."""
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

# SPDX-License-Identifier: Apache-2.0
"""A log-prob server's queue: right version or marked, nothing kept or lost, nothing waits without an end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recipe.async_engine.core.scoring import (
    STATIC,
    Anchor,
    Promotion,
    ScoringBatch,
    ScoringQueue,
    ScoringRequest,
    ScoringSettings,
)

BUDGET, DELAY_S, DRAIN_S = 100, 1.0, 10.0


def queue_of(anchor: Anchor = Anchor.GENERATION, **changes: bool) -> ScoringQueue:
    return ScoringQueue(ScoringSettings(anchor, BUDGET, DELAY_S, DRAIN_S, **changes))


def request(number: int, version: int, tokens: int = 10, start: int = 0, arrived: float = 0.0) -> ScoringRequest:
    return ScoringRequest(number, version, tokens, start, arrived)


def serve(queue: ScoringQueue, version: int, now: float = 0.0) -> None:
    """Let the queue hold its first weights."""
    queue.begin_load(version)
    queue.staged(now)
    assert queue.next(now) == Promotion(version)
    queue.promoted()


def stage(queue: ScoringQueue, version: int, now: float) -> None:
    queue.begin_load(version)
    queue.staged(now)


def test_weights_that_are_there_from_the_start_score_at_once_and_for_good() -> None:
    queue = ScoringQueue(ScoringSettings(Anchor.LATEST, BUDGET, DELAY_S, DRAIN_S), live=STATIC)
    assert queue.submit(request(1, STATIC))
    assert scored_by(queue, DELAY_S).version == STATIC
    assert queue.submit(request(2, STATIC, arrived=99.0))
    assert not queue.submit(request(3, STATIC + 1)), "no other version comes"
    assert scored_by(queue, 100.0).late == frozenset()


def scored_by(queue: ScoringQueue, now: float) -> ScoringBatch:
    batch = queue.next(now)
    assert isinstance(batch, ScoringBatch)
    queue.scored()
    return batch


def test_batch_waits_for_others_but_not_longer_than_the_delay() -> None:
    queue = queue_of()
    serve(queue, 0)
    assert queue.submit(request(1, 0))
    assert queue.next(0.5) is None and queue.wake_at() == DELAY_S
    assert queue.submit(request(2, 0, arrived=0.5))
    assert [r.id for r in scored_by(queue, DELAY_S).requests] == [1, 2]


def test_full_batch_goes_at_once_and_the_oldest_groups_first() -> None:
    queue = queue_of()
    serve(queue, 5)
    for number, start in ((1, 5), (2, 3), (3, 4)):
        queue.submit(request(number, 5, tokens=40, start=start))
    batch = queue.next(0.0)
    assert isinstance(batch, ScoringBatch)
    assert [r.id for r in batch.requests] == [2, 3] and batch.tokens == 80
    assert queue.next(99.0) is None, "one batch at a time"


def test_batch_is_filled_to_its_last_token() -> None:
    queue = queue_of()
    serve(queue, 0)
    for number, tokens in enumerate((60, 40, 1)):
        queue.submit(request(number, 0, tokens=tokens))
    assert [r.id for r in scored_by(queue, DELAY_S).requests] == [0, 1]


@pytest.mark.parametrize("holds", [False, True])
def test_answers_are_held_while_weights_arrive_only_where_that_is_asked_for(holds: bool) -> None:
    queue = queue_of(holds_for_weights=holds)
    serve(queue, 0)
    queue.submit(request(1, 0))
    queue.begin_load(1)
    assert (queue.next(DELAY_S) is None) == holds
    if holds:
        queue.staged(DELAY_S)
        assert [r.id for r in scored_by(queue, DELAY_S).requests] == [1]


def test_sequence_larger_than_a_batch_is_scored_alone() -> None:
    queue = queue_of()
    serve(queue, 0)
    queue.submit(request(1, 0, tokens=3 * BUDGET))
    queue.submit(request(2, 0))
    assert [r.id for r in scored_by(queue, 0.0).requests] == [1]


def test_server_moves_on_when_its_version_is_scored_and_the_next_is_asked_for() -> None:
    queue = queue_of()
    serve(queue, 0)
    queue.submit(request(1, 0))
    stage(queue, 1, now=0.1)
    assert queue.next(0.1) is None, "nobody asks for version 1, and the batch may still fill"
    queue.submit(request(2, 1, arrived=0.2))
    assert [r.id for r in scored_by(queue, 0.2).requests] == [1]
    assert queue.next(0.2) == Promotion(1)
    queue.promoted()
    batch = scored_by(queue, 0.2 + DELAY_S)
    assert (batch.version, batch.late) == (1, frozenset())


def test_segment_that_is_on_its_way_during_a_sync_finds_its_version() -> None:
    queue = queue_of()
    serve(queue, 0)
    stage(queue, 1, now=0.1)
    assert queue.next(5.0) is None and queue.wake_at() is None
    queue.submit(request(1, 0, arrived=5.0))
    assert scored_by(queue, 6.0).late == frozenset()


def test_next_weights_push_out_staged_ones_that_nobody_asked_for() -> None:
    queue = queue_of()
    serve(queue, 0)
    stage(queue, 1, now=0.1)
    queue.begin_load(2)
    assert not queue.may_stage
    assert queue.next(0.2) == Promotion(1)
    queue.promoted()
    assert queue.may_stage


def test_what_misses_the_deadline_is_scored_by_the_live_version_and_marked() -> None:
    queue = queue_of()
    serve(queue, 0)
    queue.paused = True
    queue.submit(request(1, 0))
    stage(queue, 1, now=1.0)
    queue.submit(request(2, 1, arrived=1.0))
    assert queue.next(10.9) is None and queue.wake_at() == 1.0 + DRAIN_S
    assert queue.next(11.0) == Promotion(1)
    queue.promoted()
    queue.paused = False
    batch = scored_by(queue, 12.0)
    assert (batch.version, batch.late) == (1, frozenset({1}))


def test_request_for_a_version_that_is_not_on_its_way_is_refused_and_one_whose_load_fails_is_handed_back() -> None:
    queue = queue_of()
    assert not queue.submit(request(1, 0)), "no weights were ever announced"
    serve(queue, 0)
    assert not queue.submit(request(1, 1))
    queue.begin_load(1)
    assert queue.submit(request(1, 1)) and queue.submit(request(2, 0))
    assert [r.id for r in queue.load_failed()] == [1]
    assert [r.id for r in scored_by(queue, DELAY_S).requests] == [2]


def test_latest_moves_on_at_once_and_never_looks_back() -> None:
    queue = queue_of(Anchor.LATEST)
    serve(queue, 0)
    queue.submit(request(1, 0))
    stage(queue, 1, now=0.0)
    assert queue.next(0.0) == Promotion(1)
    queue.promoted()
    assert (scored_by(queue, DELAY_S).version, len(queue)) == (1, 0)


def test_latest_waits_for_newer_weights() -> None:
    queue = queue_of(Anchor.LATEST)
    serve(queue, 0)
    queue.begin_load(1)
    queue.submit(request(1, 1))
    assert queue.next(DELAY_S) is None and queue.wake_at() is None


@pytest.mark.parametrize("anchor", list(Anchor))
def test_which_versions_are_waited_for_goes_by_the_anchor(anchor: Anchor) -> None:
    queue = queue_of(anchor)
    queue.begin_load(2)
    queue.staged(0.0)
    # Weights of 2 answer for 1 where the latest do; where each version is scored by its own, 1 is over.
    assert [queue.submit(request(number, number)) for number in (1, 2, 3)] == [anchor is Anchor.LATEST, True, False]


def test_weights_out_of_order_are_refused() -> None:
    queue = queue_of()
    with pytest.raises(ValueError, match="no weights can become staged now"):
        queue.staged(0.0)
    serve(queue, 3)
    with pytest.raises(ValueError, match="version 2 is older than version 3"):
        queue.begin_load(2)
    queue.begin_load(4)
    with pytest.raises(ValueError, match="version 4 is already being loaded"):
        queue.begin_load(5)
    queue.submit(request(1, 3))
    with pytest.raises(ValueError, match="request 1 is already queued"):
        queue.submit(request(1, 3))


class Server(RuleBasedStateMachine):
    """Any order of events; an owner that does what it is told."""

    @initialize(anchor=st.sampled_from(Anchor), holds=st.booleans(), serves=st.booleans())
    def start(self, anchor: Anchor, holds: bool, serves: bool) -> None:
        self.anchor, self.holds = anchor, holds
        self.queue = queue_of(anchor, holds_for_weights=holds)
        self.now, self.version, self.numbers = 0.0, -1, 0
        self.waiting: dict[int, ScoringRequest] = {}
        self.running: ScoringBatch | None = None
        self.loading = self.receiving = False
        self.staged_at: float | None = None
        self.refused: int | None = None
        if serves:
            serve(self.queue, 0)
            self.version = 0

    @rule(seconds=st.floats(0.0, 4.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(back=st.integers(-1, 3), tokens=st.integers(1, 150), start=st.integers(0, 5))
    def submit(self, back: int, tokens: int, start: int) -> None:
        self.numbers += 1
        new = ScoringRequest(self.numbers, self.version - back, tokens, start, self.now)
        newest, live = self.queue.newest, self.queue.live
        accepted = self.queue.submit(new)
        if newest is None or new.version > newest:
            assert not accepted
        if live is not None and new.version <= live:
            assert accepted
        if accepted:
            self.waiting[new.id] = new

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.withdraw(number)
        del self.waiting[number]
        assert not self.queue.withdraw(number)

    @rule()
    def next_weights_come_nearer(self) -> None:
        """They are announced, then sent, then complete."""
        if not self.loading:
            self.version += 1
            self.queue.begin_load(self.version)
            self.loading = True
        elif self.receiving:
            self.queue.staged(self.now)
            self.loading = self.receiving = False
            self.staged_at = self.now
            self.refused = None
        elif self.queue.may_stage:
            assert not (self.holds and self.running)
            self.receiving = True

    @precondition(lambda self: self.loading)
    @rule()
    def fail_load(self) -> None:
        for lost in self.queue.load_failed():
            # No version that is still here, or on its way, would do.
            newest = self.queue.newest
            assert newest is None or self.waiting[lost.id].version > newest
            del self.waiting[lost.id]
        self.loading = self.receiving = False

    @precondition(lambda self: not self.loading and self.version >= 0)
    @rule()
    def refuse(self) -> None:
        self.refused = self.version
        for lost in self.queue.refused():
            del self.waiting[lost.id]
        assert self.queue.live is None and not self.waiting, "nothing is on its way"

    @rule()
    def pause_or_resume(self) -> None:
        self.queue.paused = not self.queue.paused

    @precondition(lambda self: self.running is None)
    @rule()
    def ask(self) -> None:
        action = self.queue.next(self.now)
        if isinstance(action, Promotion):
            assert self.queue.live is None or action.version > self.queue.live
            if self.anchor is Anchor.GENERATION and self.queue.live is not None:
                left = [r for r in self.waiting.values() if r.version == self.queue.live]
                assert not left or self.now >= self.staged_at + DRAIN_S
            self.queue.promoted()
        elif action is not None:
            self.check(action)
            self.running = action

    def check(self, batch: ScoringBatch) -> None:
        assert not (self.holds and self.receiving)
        assert not self.queue.paused and batch.requests and batch.version == self.queue.live != self.refused
        assert batch.tokens <= BUDGET or len(batch.requests) == 1
        for one in batch.requests:
            assert self.waiting.pop(one.id) == one
            if self.anchor is Anchor.GENERATION:
                assert one.version <= batch.version
                assert (one.id in batch.late) == (one.version < batch.version)
            else:
                assert (one.id in batch.late) == (one.version > batch.version)
                assert one.id not in batch.late

    @precondition(lambda self: self.running is not None)
    @rule()
    def finish(self) -> None:
        self.queue.scored()
        self.running = None

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.waiting)

    def teardown(self) -> None:
        """Left alone, and told when to wake, the owner answers everything that has not been refused."""
        if not hasattr(self, "queue"):
            return
        self.queue.paused = False
        if self.running is not None:
            self.finish()
        if self.loading:
            self.fail_load()
        for _ in range(2 * self.numbers + 2):
            before = self.queue.live, len(self.waiting)
            self.ask()
            if self.running is not None:
                self.finish()
            if (self.queue.live, len(self.waiting)) == before:
                wake = self.queue.wake_at()
                if wake is None:
                    break
                assert wake > self.now, "woken for nothing"
                self.now = wake
        assert not self.waiting


Server.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestServer = Server.TestCase

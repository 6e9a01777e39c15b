# SPDX-License-Identifier: Apache-2.0
"""Whole batches: fixed at issue, trained in order, each exactly one version late."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import Group, GroupState, PromptRef
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import WholeBatches

EVENT_LIMIT = 5000


@dataclass
class Run:
    """A random run: a rollout that drains before each announcement, over groups that end in any order."""

    rng: random.Random
    size: int
    bound: int
    steps: int
    prompts: int
    failures: float
    resumes: float
    ledger: SampleLedger = field(init=False)
    issued: int = 0
    trained: list[list[Group]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = SampleLedger(self.gate, policy=WholeBatches(), target_groups=self.steps * self.size)

    @property
    def gate(self) -> GateSettings:
        return GateSettings(self.size, 1, self.bound, self.bound)

    def may_issue(self) -> bool:
        return self.ledger.can_issue() and self.issued < self.prompts

    def end_one(self) -> None:
        group = self.rng.choice(self.ledger.in_state(GroupState.RUNNING))
        if self.rng.random() < self.failures:
            (self.ledger.fail if self.rng.random() < 0.5 else self.ledger.filter)(group.id, "chance")
        else:
            self.ledger.mark_ready(group.id, group.start)

    def issue(self) -> None:
        self.ledger.issue(PromptRef(self.issued, 0, f"0-{self.issued}"))
        self.issued += 1

    def train(self) -> None:
        taken = self.ledger.take()
        self.trained.append(taken)
        late = {self.ledger.version - group.start for group in taken}
        assert late == {0 if len(self.trained) == 1 else self.bound}
        self.ledger.mark_trained()

    def resume(self) -> None:
        snapshot = json.loads(json.dumps(self.ledger.snapshot()))
        self.ledger = SampleLedger.restore(
            snapshot, self.gate, policy=WholeBatches(), target_groups=self.steps * self.size
        )

    def go(self) -> None:
        for _ in range(EVENT_LIMIT):
            running = self.ledger.in_state(GroupState.RUNNING)
            events = [self.issue] if self.may_issue() else []
            events += [self.end_one] if running else []
            events += [self.train] if self.ledger.next_batch() is not None else []
            drained = not running and not self.may_issue()
            on_its_way = self.ledger.announced < self.ledger.version
            events += [self.ledger.seal] if self.ledger.batches_left == 0 and not on_its_way else []
            events += [self.ledger.announce] if on_its_way and drained else []
            if not events:
                break
            self.rng.choice(events)()
            self.ledger.check_identity()
            # A checkpoint is written once a version is announced, while the next batch may run.
            announced = self.ledger.announced == self.ledger.version
            if self.ledger.batches_left == 1 and announced and self.rng.random() < self.resumes:
                self.resume()
        else:
            raise AssertionError(f"no end after {EVENT_LIMIT} events: {self.ledger.counts()}")
        left = min(self.prompts - self.issued, self.steps * self.size)
        done = len(self.trained) == self.steps
        assert done or not self.ledger.batch_possible(left), f"stuck: {self.ledger.counts()}"


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    bound=st.integers(0, 1),
    steps=st.integers(1, 6),
    spare=st.integers(-3, 40),
    failures=st.sampled_from((0.0, 0.0, 0.2, 0.5)),
    resumes=st.sampled_from((0.0, 0.3)),
)
def test_batches_are_trained_in_order_each_exactly_one_version_late(
    seed: int, size: int, bound: int, steps: int, spare: int, failures: float, resumes: float
) -> None:
    run = Run(random.Random(seed), size, bound, steps, max(1, steps * size + spare), failures, resumes)
    run.go()
    for number, batch in enumerate(run.trained):
        assert len(batch) == size
        assert {group.batch for group in batch} == {number}
        assert [group.id for group in batch] == sorted(group.id for group in batch)
    if failures == 0.0:
        order = [group.prompt.index for batch in run.trained for group in batch]
        assert order == list(range(len(order)))


def issue(ledger: SampleLedger, count: int) -> list[int]:
    issued = ledger.counts().issued
    return [ledger.issue(PromptRef(index, 0, str(index))).id for index in range(issued, issued + count)]


def test_a_ready_batch_waits_for_the_one_before_it() -> None:
    ledger = SampleLedger(GateSettings(2, 1, 1, 1), policy=WholeBatches())
    first, second, third, fourth = issue(ledger, 4)
    for group_id in (third, fourth, second):
        ledger.mark_ready(group_id, 0)
    assert ledger.next_batch() is None
    ledger.mark_ready(first, 0)
    assert [group.id for group in ledger.take()] == [first, second]


def test_a_replacement_takes_the_place_of_the_group_that_failed() -> None:
    ledger = SampleLedger(GateSettings(2, 1, 1, 1), policy=WholeBatches())
    first, second, third, _ = issue(ledger, 4)
    ledger.fail(first, "chance")
    (replacement,) = issue(ledger, 1)
    for group_id in (second, third, replacement):
        ledger.mark_ready(group_id, 0)
    assert [group.id for group in ledger.take()] == [second, replacement]


def test_without_prompts_for_the_next_batch_no_batch_is_possible() -> None:
    ledger = SampleLedger(GateSettings(2, 1, 1, 1), policy=WholeBatches())
    first, *_ = issue(ledger, 4)
    ledger.fail(first, "chance")
    assert ledger.batch_possible(prompts_left=1)
    assert not ledger.batch_possible(prompts_left=0)


def test_places_are_given_in_order() -> None:
    ledger = SampleLedger(GateSettings(2, 1, 1, 1), policy=WholeBatches())
    places = [ledger.find(group_id) for group_id in issue(ledger, 4)]
    assert [group.batch for group in places if group] == [0, 0, 1, 1]
    ledger.fail(2, "chance")
    for group_id in (0, 1):
        ledger.mark_ready(group_id, 0)
    ledger.take()
    (replacement,) = issue(ledger, 1)
    assert [group.batch for group in ledger.in_state(GroupState.RUNNING) if group.id in (3, replacement)] == [1, 1]
    ledger.return_batch()
    assert [group.id for group in ledger.take()] == [0, 1]

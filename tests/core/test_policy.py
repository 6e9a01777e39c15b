# SPDX-License-Identifier: Apache-2.0
"""Admission policies choose within the gate: whatever one does, the bound holds and the books close."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_engine.core.errors import GateError, LedgerError, SettingError
from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import Group, GroupState, Prompt, PromptRef
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import (
    POLICIES,
    Batch,
    OldestReady,
    PolicyError,
    ReadyGroups,
    Turns,
    admission_policy,
    chosen_prompt,
)
from recipe.async_engine.core.prompt_manager import PromptManager, Trajectory, TrajectoryState

DOCUMENTED = Path(__file__).parents[2] / "docs" / "extending.md"


class RandomPolicy(OldestReady):
    """Chooses at random among everything that a policy could answer, sound or not."""

    def __init__(self, rng: random.Random, malicious: bool) -> None:
        self.rng, self.malicious = rng, malicious
        self.whole_groups = rng.random() < 0.5

    def next_prompt(self, prompts: Any) -> Any:
        sound = [None, *range(len(prompts))]
        return self.rng.choice([*sound, -1, len(prompts), "0", 0.5] if self.malicious else sound)

    def rank(self, group: Group, index: int) -> Any:
        rank = self.rng.uniform(-5, 5)
        return self.rng.choice([rank, float("nan"), None, group]) if self.malicious else rank

    def next_batch(self, ready: ReadyGroups) -> Any:
        groups, size = list(ready), ready.batch_groups
        chosen = self.rng.sample(groups, size)
        if not self.malicious:
            return None if len(groups) % 5 == 4 else self.rng.choice([chosen, ready.oldest()])
        forged = [Group(900 + n, PromptRef(900 + n, 0, "forged"), ready.version) for n in range(size)]
        lie = Batch({ready.version: size}, lambda: chosen)
        return self.rng.choice([chosen, chosen[:-1], [chosen[0]] * (size + 1), [*groups, *groups], forged, 7, [7], lie])


class Run:
    """A random run of ledger and prompt manager under a policy."""

    def __init__(self, seed: int, malicious: bool) -> None:
        rng = self.rng = random.Random(seed)
        bound = rng.randint(0, 3)
        gate = GateSettings(rng.randint(1, 3), rng.randint(1, 2), bound, rng.uniform(0, bound))
        self.bound, self.seed = bound, seed
        self.policy = RandomPolicy(random.Random(seed), malicious)
        self.ledger = SampleLedger(gate, policy=self.policy)
        self.manager = PromptManager(self.ledger, rng.randint(1, 2), 4)
        self.manager.open()
        self.data = [Prompt(0, n, {}) for n in range(200)]
        self.refused = 0

    def issue(self) -> bool:
        place = chosen_prompt(self.policy, self.data[:8])
        if place is not None:
            self.manager.issue(self.data.pop(place).reference)
        return place is not None

    def step(self) -> None:
        ledger, manager = self.ledger, self.manager
        list(manager.picks(self.issue, 4))
        for group in ledger.in_state(GroupState.RUNNING):
            states = [manager.state(Trajectory(group.id, n)) for n in range(manager.group_size)]
            for n, state in enumerate(states):
                if state is TrajectoryState.RUNNING and self.rng.random() < 0.5:
                    manager.sampled(Trajectory(group.id, n))
                    states[n] = TrajectoryState.SAMPLED
            if set(states) == {TrajectoryState.SAMPLED}:
                manager.complete(group.id, group.start)
        if ledger.batches_left == 0:
            ledger.seal()
            ledger.announce()
        elif ledger.may_take():
            for group in ledger.take():
                assert ledger.version - group.start <= self.bound
            ledger.mark_trained()

    def go(self, steps: int) -> None:
        for _ in range(steps):
            try:
                self.step()
            except (PolicyError, GateError, LedgerError):
                # It ends a run; the books are closed as they are.
                self.refused += 1
            self.ledger.check_identity()
            counts = self.ledger.counts()
            assert counts.issued == counts.trained + counts.live
            assert self.ledger.staleness.max <= self.bound


@given(st.integers(0, 10**9), st.booleans())
@settings(max_examples=150, deadline=None)
def test_whatever_a_policy_does_the_bound_holds_and_the_books_close(seed: int, malicious: bool) -> None:
    run = Run(seed, malicious)
    run.go(60)
    assert malicious or not run.refused


def test_a_choice_that_the_gate_refuses_gives_way_to_the_oldest_that_are_due() -> None:
    class Newest(OldestReady):
        def next_batch(self, ready: ReadyGroups) -> Any:
            return sorted(ready, key=lambda group: -group.id)[: ready.batch_groups]

    ledger = SampleLedger(GateSettings(1, 1, 1, 1), policy=Newest())
    for n in range(2):
        ledger.mark_ready(ledger.issue(PromptRef(n, 0, str(n))).id, 0)
    assert [group.id for group in ledger.take()] == [1], "its own choice, while the other one has a place"
    ledger.mark_trained()
    ledger.seal()
    ledger.announce()
    ledger.mark_ready(ledger.issue(PromptRef(2, 0, "2")).id, 1)
    assert [group.id for group in ledger.take()] == [0], "it would be past its bound after the next version"


def test_a_policy_that_raises_is_named_with_its_words() -> None:
    class Broken(OldestReady):
        def rank(self, group: Group, index: int) -> float:
            raise KeyError("difficulty")

    manager = PromptManager(SampleLedger(GateSettings(1, 1, 0, 0), policy=Broken()), 1, 1)
    manager.open()
    with pytest.raises(PolicyError, match=r"Broken.rank raised KeyError: 'difficulty'"):
        manager.issue(PromptRef(0, 0, "0"))


def test_groups_begin_whole_whatever_the_ranks_of_their_trajectories() -> None:
    class Mixed(OldestReady):
        def rank(self, group: Group, index: int) -> float:
            return index

    manager = PromptManager(SampleLedger(GateSettings(2, 1, 0, 0), policy=Mixed()), 2, 3)
    manager.open()
    for n in range(2):
        manager.issue(PromptRef(n, 0, str(n)))
    assert list(manager.picks(lambda: False)) == [Trajectory(0, 0), Trajectory(0, 1)]


@pytest.mark.parametrize("name", ["", "newest", "no_such_module.Policy", "json.JSONDecoder", "json.NoSuchClass"])
def test_a_policy_that_is_none_is_refused_by_its_setting(name: str) -> None:
    with pytest.raises(SettingError, match=r"async_training.admission_policy = "):
        admission_policy(name)


def test_each_of_the_three_is_made_by_its_name() -> None:
    assert {name: type(admission_policy(name)) for name in POLICIES} == POLICIES
    assert not Turns().whole_groups


def test_the_documented_policy_works_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very text of docs/extending.md, loaded by the name that its setting has."""
    text = re.search(r"```python\n# my_policy.py\n(.*?)```", DOCUMENTED.read_text(), re.DOTALL)
    assert text is not None
    (tmp_path / "my_policy.py").write_text(text[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    named = re.search(r"async_training.admission_policy=(my_policy\.\w+)", DOCUMENTED.read_text())
    assert named is not None
    policy = admission_policy(named[1])
    sys.modules.pop("my_policy")

    ledger = SampleLedger(GateSettings(2, 1, 1, 1), policy=policy)
    manager = PromptManager(ledger, 1, 8)
    manager.open()
    data = [Prompt(0, n, {"extra_info": [{"difficulty": level}]}) for n, level in enumerate([5, 1, 4, 2, 3, 0])]
    issued: list[int] = []

    def issue() -> bool:
        place = chosen_prompt(policy, data)
        if place is None:
            return False
        prompt = data.pop(place)
        issued.append(prompt.row["extra_info"][0]["difficulty"])
        manager.issue(prompt.reference)
        return True

    began = list(manager.picks(issue))
    assert issued == [0, 1, 2, 3], "the easy ones first, and no more than the gate admits"
    for trajectory in began:
        manager.sampled(trajectory)
        manager.complete(trajectory.group_id, 0)
    assert len(ledger.take()) == 2
    ledger.mark_trained()
    ledger.check_identity()

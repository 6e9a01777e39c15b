# SPDX-License-Identifier: Apache-2.0
"""How much of the slots' empty time turns save, counted in decode steps: the prompt manager and the ledger alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import PromptRef
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import Turns
from recipe.async_engine.core.prompt_manager import PromptManager, Trajectory, TrajectoryState

SHORT, LONG, PERIOD, PLACE = 6, 120, 20, 10
# Beginning and ending a turn, prefilling included.
TURN_STEPS = 2


@dataclass
class Generated:
    """steps: decode steps of all counted turns. busy: slot-steps used in them. staleness: the largest seen."""

    steps: int
    busy: int
    staleness: int


def generate(batch: int, answers: int, slots: int, bound: int, turns: int, skip: int, tail: bool = True) -> Generated:
    """Turns of generation in which every running answer gets one token a step."""
    manager = PromptManager(SampleLedger(GateSettings(batch, 1, bound, min(1, bound)), policy=Turns()), answers, slots)
    left: dict[Trajectory, int] = {}
    running: set[Trajectory] = set()
    result = Generated(0, 0, 0)
    manager.open()
    for turn in range(turns):
        manager.slots = slots
        steps, busy = TURN_STEPS, 0
        while manager.ledger.next_batch() is None:
            _fill(manager, left, running, tail)
            steps, busy = steps + 1, busy + len(running)
            for trajectory in sorted(running, key=lambda one: (one.group_id, one.index)):
                left[trajectory] -= 1
                if left[trajectory] == 0:
                    running.remove(trajectory)
                    _end(manager, trajectory)
        manager.ledger.take()
        manager.slots = 0
        manager.ledger.mark_trained()
        manager.ledger.seal()
        manager.ledger.announce()
        if turn >= skip:
            result.steps, result.busy = result.steps + steps, result.busy + busy
    result.staleness = manager.ledger.staleness.max
    return result


def _fill(manager: PromptManager, left: dict[Trajectory, int], running: set[Trajectory], tail: bool) -> None:
    while True:
        picked = manager.next()
        if picked is None:
            if not manager.wants_prompt():
                return
            index = manager.ledger.counts().issued
            manager.issue(PromptRef(index, 0, str(index)))
            continue
        is_long = tail and picked.group_id % PERIOD == PLACE
        left.setdefault(picked, LONG if is_long else SHORT)
        running.add(picked)


def _end(manager: PromptManager, trajectory: Trajectory) -> None:
    manager.sampled(trajectory)
    siblings = [Trajectory(trajectory.group_id, index) for index in range(manager.group_size)]
    if all(manager.state(sibling) is TrajectoryState.SAMPLED for sibling in siblings):
        group = manager.ledger.find(trajectory.group_id)
        assert group is not None
        manager.complete(group.id, group.start)


@pytest.mark.parametrize(("slots", "bound", "least_idle"), [(16, 4, 0.4), (32, 6, 0.57)])
def test_at_least_nine_tenths_of_the_synchronous_idle_share_are_saved(
    slots: int, bound: int, least_idle: float
) -> None:
    # Both counts are whole periods of the data.
    sync = generate(16, 4, slots, 0, turns=10, skip=0)
    partial = generate(16, 4, slots, bound, turns=40, skip=20)
    idle = 1 - sync.busy / (sync.steps * slots)
    saved = 1 - (partial.steps / 20) / (sync.steps / 10)
    assert idle >= least_idle
    assert saved >= 0.9 * idle
    assert partial.staleness <= bound
    if least_idle >= 0.57:
        assert saved >= 0.511


def test_answers_of_one_length_take_no_longer_than_in_synchronous_training() -> None:
    sync = generate(16, 4, 32, 0, turns=10, skip=0, tail=False)
    partial = generate(16, 4, 32, 1, turns=10, skip=0, tail=False)
    assert partial.steps <= sync.steps

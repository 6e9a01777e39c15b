# SPDX-License-Identifier: Apache-2.0
"""The number of generation slots may change at any moment: bound, counts and progress hold, and faults are found."""

from __future__ import annotations

import os

import pytest
from capacity_schedules import run_capacity_schedules
from schedule_simulator import Violation

from recipe.async_engine.core.errors import LedgerError
from recipe.async_engine.core.prompt_manager import PromptManager, Trajectory, TrajectoryState

SCHEDULES = int(os.environ.get("RECIPE_CAPACITY_SCHEDULES", "400"))
FOUND_WITHIN = 200


@pytest.mark.parametrize("block", range(4))
def test_bound_counts_and_progress_hold_while_the_number_of_slots_changes(block: int) -> None:
    done = run_capacity_schedules(range(block * SCHEDULES // 4, (block + 1) * SCHEDULES // 4))
    assert all(done.values()), f"something never happened, so nothing was shown of it: {done}"


class MoreThanItsSlots(PromptManager):
    def _fits(self, waiting: int) -> bool:
        return self.slots - self.running >= waiting - 1


class StartsInADrain(PromptManager):
    def drain(self) -> None:
        """Generation stays open."""


class LosesAFailedAttempt(PromptManager):
    def begin_again(self, trajectory: Trajectory) -> bool:
        if self.state(trajectory) is TrajectoryState.RUNNING:
            return True
        self._states[trajectory.group_id][trajectory.index] = TrajectoryState.PENDING
        return False


class KeepsTheSlotOfAGroupThatEnded(PromptManager):
    def _leave(self, group_id: int) -> None:
        del self._states[group_id]


class YoungestFirst(PromptManager):
    def _wait(self, trajectory: Trajectory) -> None:
        super()._wait(trajectory)
        self._waiting.sort(reverse=True)


@pytest.mark.parametrize(
    "faulty", [MoreThanItsSlots, StartsInADrain, LosesAFailedAttempt, KeepsTheSlotOfAGroupThatEnded, YoungestFirst]
)
def test_a_deliberate_fault_is_found(faulty: type[PromptManager]) -> None:
    with pytest.raises((Violation, LedgerError)):
        run_capacity_schedules(range(FOUND_WITHIN), faulty)

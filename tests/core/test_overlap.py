# SPDX-License-Identifier: Apache-2.0
"""Reward seconds are hidden unless only rewards keep the run from going on."""

from __future__ import annotations

import pytest

from recipe.async_engine.core.overlap import RewardOverlap


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_only_seconds_in_which_nothing_else_goes_on_are_exposed() -> None:
    clock = Clock()
    overlap = RewardOverlap(clock)
    assert (overlap.seconds, overlap.hidden_share) == (0.0, 1.0)
    overlap.change(generating=2)
    clock.now += 5
    overlap.change(scoring=1, generating=-1)
    overlap.wait(True)
    clock.now += 4  # the other one generates
    assert (overlap.seconds, overlap.hidden_share) == (4.0, 1.0)
    overlap.change(scoring=1, generating=-1)
    clock.now += 3  # two are scored, and the trainer waits for them
    assert overlap.seconds == 10.0
    assert overlap.hidden_share == pytest.approx(0.4)
    overlap.change(scoring=-1)
    overlap.wait(False)
    clock.now += 10  # the trainer trains
    assert overlap.seconds == 20.0
    assert overlap.hidden_share == pytest.approx(0.7)
    overlap.change(scoring=-1)
    clock.now += 100
    assert (overlap.seconds, overlap.scoring) == (20.0, 0)

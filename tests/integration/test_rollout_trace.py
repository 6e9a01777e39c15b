# SPDX-License-Identifier: Apache-2.0
"""Which groups verl's rollout trace has; that their spans are there, test_trajectory_worker.py shows."""

from __future__ import annotations

from recipe.async_engine.rollout.worker_pool import TracedGroups


def test_first_groups_of_each_version_are_traced_with_all_their_answers() -> None:
    traced = TracedGroups(2)
    asked = [(0, 0), (1, 0), (2, 0), (0, 0), (3, 1), (2, 0), (4, 1), (5, 1), (1, 0)]
    assert [group for group, version in asked if traced.has(group, version)] == [0, 1, 0, 3, 4, 1]


def test_without_a_limit_every_group_is_and_with_0_none() -> None:
    assert all(TracedGroups().has(group, 0) for group in range(100))
    assert not any(TracedGroups(0).has(group, 0) for group in range(100))

# SPDX-License-Identifier: Apache-2.0
"""The count of filtered groups is that of a synchronous run, in whatever order groups end."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.groups import FilterCount

KEPT, FILTERED, FAILED = "kept", "filtered", "failed"


def synchronous_run_ends(outcomes: list[str], batch: int, limit: int) -> bool:
    """Whether training one batch after the other, in this order, meets a batch that costs ``limit`` filtered groups."""
    kept = filtered = 0
    for outcome in outcomes:
        kept += outcome == KEPT
        filtered += outcome == FILTERED
        if limit and filtered >= limit:
            return True
        if kept == batch:
            kept = filtered = 0
    return False


def count_in_order(outcomes: list[str], order: list[int], batch: int, limit: int, pipeline: int) -> bool:
    """The count's answer where ``pipeline`` groups are under way at once and end in this order of preference."""
    count = FilterCount(batch, limit)
    rank = {group: place for place, group in enumerate(order)}
    running: list[int] = []
    issued = 0
    while issued < len(outcomes) or running:
        while issued < len(outcomes) and len(running) < pipeline:
            count.issued(issued)
            running.append(issued)
            issued += 1
        group = min(running, key=rank.__getitem__)
        running.remove(group)
        if outcomes[group] != FAILED:
            count.ended(group, outcomes[group] == KEPT)
        count.forget(group)
    return count.exceeded


@given(
    outcomes=st.lists(st.sampled_from([KEPT, FILTERED, FAILED]), max_size=60),
    batch=st.integers(1, 4),
    limit=st.integers(0, 8),
    pipeline=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_the_count_exceeds_its_limit_exactly_where_a_synchronous_run_would_end(
    outcomes: list[str], batch: int, limit: int, pipeline: int, seed: int
) -> None:
    order = list(range(len(outcomes)))
    random.Random(seed).shuffle(order)
    assert count_in_order(outcomes, order, batch, limit, pipeline) == synchronous_run_ends(outcomes, batch, limit)


def test_groups_of_before_a_resume_are_not_counted() -> None:
    count = FilterCount(1, 1)
    count.ended(5, kept=False)
    count.forget(5)
    assert not count.exceeded

# SPDX-License-Identifier: Apache-2.0
"""Versions that were published with the weights of the version before."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.alarms import AlarmLimit, Alarms, UnchangedWeights

STEPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0.0, 0.5, math.nan, math.inf]), min_size=1, max_size=3),
        st.sampled_from([0.0, 1e-6]),
        st.booleans(),
    ),
    max_size=24,
)


@given(steps=STEPS, batches=st.integers(1, 3))
def test_a_version_is_unchanged_if_an_update_with_gradient_and_rate_left_its_checksum(
    steps: list[tuple[list[float], float, bool]], batches: int
) -> None:
    """Each step has its gradients' norms, its learning rate, and whether the weights that are sent change after it."""
    unchanged = UnchangedWeights()
    assert unchanged.published(0, "0") is False
    rates = [rate for _, rate, _ in steps] + [0.0]
    sent, due, changes = 0, False, False
    for step, (norms, _, is_changed) in enumerate(steps, start=1):
        unchanged.updated(norms, rates[step])
        # Whatever the first step's learning rate was, it has not been reported.
        due |= step > 1 and rates[step - 1] > 0 and any(0 < norm < math.inf for norm in norms)
        changes |= is_changed
        if step % batches:
            continue
        version = step // batches
        unchanged.seal(version)
        sent += changes
        expected = False if changes else True if due else None
        assert unchanged.published(version, str(sent)) is expected
        due = changes = False


def test_versions_that_are_announced_late_are_judged_by_their_own_updates() -> None:
    """The trainer has sealed the next version before the replicas hold this one."""
    unchanged = UnchangedWeights()
    unchanged.published(0, "a")
    unchanged.updated([1.0], 1e-6)
    unchanged.seal(1)
    unchanged.updated([1.0], 1e-6)
    unchanged.seal(2)
    assert unchanged.published(1, "a") is None, "its learning rate is not known"
    assert unchanged.published(2, "a") is True


def test_the_first_publication_and_a_second_one_of_the_same_version_are_compared_with_nothing() -> None:
    unchanged = UnchangedWeights()
    assert (unchanged.published(7, "a"), unchanged.published(7, "a")) == (False, None)


def test_replicas_that_agree_on_no_checksum_are_no_alarm() -> None:
    unchanged = UnchangedWeights()
    unchanged.published(0, None)
    for version in (1, 2, 3):
        unchanged.updated([1.0], 1.0)
        unchanged.seal(version)
        assert unchanged.published(version, None) is False


@pytest.mark.parametrize(
    ("versions", "count", "ends"),
    [
        ("xx.xx", 4, False),
        ("xx-x", 3, True),
        ("x-x-x", 3, True),
        ("x-.-xx", 3, False),
        ("-----", 0, False),
    ],
)
def test_a_version_that_changed_ends_an_alarms_row_and_one_that_had_nothing_to_change_does_not(
    versions: str, count: int, ends: bool
) -> None:
    """x: trained, and sent as before; a dot: sent with a change; a dash: sent as before, its gradients were all 0."""
    unchanged, alarms = UnchangedWeights(), Alarms({"unchanged_weights": 3})
    unchanged.updated([0.0], 1e-6)
    unchanged.published(0, "0")
    sent = 0
    for version, kind in enumerate(versions, start=1):
        unchanged.updated([0.0] if kind == "-" else [1.0], 1e-6)
        unchanged.seal(version)
        sent += kind == "."
        if (is_unchanged := unchanged.published(version, str(sent))) is not None:
            alarms.note("unchanged_weights", is_unchanged)
    assert alarms.counts.get("unchanged_weights", 0) == count
    with pytest.raises(AlarmLimit) if ends else nullcontext():
        alarms.check()

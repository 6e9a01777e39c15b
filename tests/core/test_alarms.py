# SPDX-License-Identifier: Apache-2.0
"""Alarms: when they ring, what they count, and when they end a run, against the plainest account of the same."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recipe.async_engine.core.alarms import FAILED_GROUPS, FEW, METRIC, WATCHED, AlarmLimit, Alarms, Ended, how_it_ended

IN_A_ROW = sorted(set(WATCHED) - {FAILED_GROUPS})
FAILED = ConnectionError("429: too many requests")
LIMIT = st.none() | st.integers(1, 6)


def rows(times: list[bool]) -> list[int]:
    """How long the condition held, each time that it did."""
    return [len(list(row)) for holds, row in groupby(times) if holds]


def ends(alarms: Alarms) -> bool:
    try:
        alarms.check()
    except AlarmLimit:
        return True
    return False


@pytest.mark.parametrize("name", IN_A_ROW)
@given(times=st.lists(st.booleans(), max_size=30), limit=LIMIT)
@example(times=[True, True], limit=None)
def test_alarm_counts_rows_as_long_as_it_takes_and_the_first_as_long_as_its_limit_ends_the_run(
    name: str, times: list[bool], limit: int | None
) -> None:
    watched, told = WATCHED[name], list[str]()
    alarms = Alarms({watched.setting: limit}, tell=told.append)
    rings_at = min(watched.rings_at, limit or watched.rings_at)
    for count in range(1, len(times) + 1):
        alarms.note(name, times[count - 1])
        so_far = rows(times[:count])
        assert alarms.counts.get(name, 0) == sum(row for row in so_far if row >= rings_at)
        assert ends(alarms) == (limit is not None and max(so_far, default=0) >= limit)
    assert len(told) == sum(row >= rings_at for row in rows(times)), "once for each row"
    if ends(alarms):
        with pytest.raises(AlarmLimit, match=rf"async_training\.alarms\.{watched.setting}={limit}"):
            alarms.finish()
        return
    alarms.finish()
    short = 0 < len(times) < rings_at and all(times)
    assert bool(alarms.summary()) == (short or any(row >= rings_at for row in rows(times)))
    assert alarms.metrics()[f"{METRIC}{name}"] == alarms.metrics()[f"{METRIC}all"] == alarms.counts.get(name, 0)


@given(
    failed=st.lists(st.sampled_from([True, False, False]), max_size=120),
    window=st.integers(1, 48),
    limit=st.none() | st.sampled_from([0.2, 0.5, 1.0]),
)
@example(failed=[False] * 28 + [True] * 4, window=1, limit=None)
@example(failed=[True] * 5 + [False] * 4, window=1, limit=0.5)
def test_share_of_failed_groups_is_judged_over_the_last_ones_and_over_all_of_a_short_run_at_its_end(
    failed: list[bool], window: int, limit: float | None
) -> None:
    alarms, size = Alarms({FAILED_GROUPS: limit}, window), max(FEW, window)
    rang = past = False
    for count, group in enumerate(failed, start=1):
        error = alarms.group_ended(FAILED if group else None)
        share = sum(failed[count - size : count]) / size if count >= size else 0.0
        rang, past = rang or share >= 0.1, past or (limit is not None and share > limit)
        assert (error is not None) == past == ends(alarms)
        assert bool(alarms.counts) == rang
    if 0 < len(failed) < size:
        share = sum(failed) / len(failed)
        rang, past = share >= 0.1, limit is not None and share > limit
    try:
        alarms.finish()
    except AlarmLimit as error:
        assert past and f"async_training.alarms.failed_groups={limit:g}" in str(error)
        assert str(FAILED) in str(error), "the user's words"
    else:
        assert not past
    assert (FAILED_GROUPS in alarms.summary()) == rang
    # Those that fail while it does not ring count from when it does.
    assert alarms.counts.get(FAILED_GROUPS, 0) <= sum(failed)


def test_alarms_of_different_names_have_rows_of_their_own() -> None:
    alarms = Alarms({"skipped_updates": 3})
    for _ in range(2):
        alarms.note("skipped_updates", True)
        alarms.note("critic_skipped_updates", True)
    alarms.check()
    alarms.note("critic_skipped_updates", True)
    with pytest.raises(AlarmLimit, match="critic"):
        alarms.check()


def test_what_rang_before_a_checkpoint_is_counted_on_and_said() -> None:
    before = Alarms({})
    before.note("unchanged_weights", True)
    for _ in range(40):
        before.group_ended(FAILED)
    after = Alarms({}, counts={**before.counts, "of another version": 7})
    assert after.counts == before.counts == {"unchanged_weights": 1, FAILED_GROUPS: 40}
    assert "before the checkpoint" in after.summary()["unchanged_weights"]["said"]
    after.note("unchanged_weights", True)
    after.group_ended(FAILED)
    after.finish()
    assert after.counts == {"unchanged_weights": 2, FAILED_GROUPS: 41}
    assert "before the checkpoint" not in after.summary()["unchanged_weights"]["said"]


def test_a_run_ends_well_with_alarms_or_failed() -> None:
    assert how_it_ended(None, {}) == Ended.WELL == "well"
    assert how_it_ended(None, {"uniform_rewards": {}}) == "with_alarms"
    assert how_it_ended({"name": "X"}, {"uniform_rewards": {}}) == how_it_ended(KeyError("x"), {}) == "failed"

# SPDX-License-Identifier: Apache-2.0
"""The staleness gate's rule, one decision at a time."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from recipe.async_engine.core.errors import GateError, RecipeError, SettingError, StalenessViolation
from recipe.async_engine.core.gate import GateSettings, StalenessGate


def settings(b: int = 2, k: int = 1, bound: int = 1, depth: Fraction | float | None = None) -> GateSettings:
    return GateSettings(b, k, bound, bound if depth is None else depth)


def test_float_depth_is_taken_as_written() -> None:
    drawn = GateSettings(batch_groups=5, batches_per_version=2, max_staleness=1, pipeline_depth=0.7)
    assert drawn.pipeline_depth == Fraction(7, 10)
    assert drawn.groups_ahead == 7
    assert GateSettings(10, 1, 1, 0.1).groups_ahead == 1
    assert GateSettings(100, 1, 1, 0.29).groups_ahead == 29  # int(0.29 * 100) is 28


def test_fractional_depth_is_rounded_down() -> None:
    assert GateSettings(3, 1, 2, Fraction(1, 2)).groups_ahead == 1
    assert GateSettings(3, 1, 2, 0).groups_ahead == 0


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("batch_groups", (0, 1, 1, 1)),
        ("batch_groups", (True, 1, 1, 1)),
        ("batch_groups", (2.0, 1, 1, 1)),
        ("batches_per_version", (1, 0, 1, 1)),
        ("max_staleness", (1, 1, -1, 0)),
        ("pipeline_depth", (1, 1, 1, 1.1)),
        ("pipeline_depth", (1, 1, 1, -0.1)),
        ("pipeline_depth", (1, 1, 1, float("nan"))),
        ("pipeline_depth", (1, 1, 1, float("inf"))),
        ("pipeline_depth", (1, 1, 1, "1")),
        ("pipeline_depth", (1, 1, 1, True)),
        ("pipeline_depth", (1, 1, 0, Fraction(1, 10**9))),
    ],
)
def test_wrong_settings_are_refused_by_name(setting: str, values: tuple[int, int, int, float]) -> None:
    with pytest.raises(SettingError, match=setting) as refusal:
        GateSettings(*values)
    assert refusal.value.setting == setting
    assert isinstance(refusal.value, RecipeError)
    assert " is not allowed: it must be " in str(refusal.value)
    assert (
        refusal.value.value
        is values[("batch_groups", "batches_per_version", "max_staleness", "pipeline_depth").index(setting)]
    )


def test_slots_count_the_places_before_the_deadline() -> None:
    gate = StalenessGate(settings(b=2, k=3, bound=1), version=5, batches_taken=1)
    assert gate.slots(5) == 6 + 4  # the next version's three batches, and two of this version
    assert gate.slots(4) == 4
    assert gate.slots(3) == 0
    assert gate.slots(0) == 0


def test_admission_stops_at_the_depth_and_goes_on_after_a_take() -> None:
    gate = StalenessGate(settings(b=2, bound=1, depth=Fraction(1, 2)))
    assert [gate.add() for _ in range(3)] == [0, 0, 0]
    assert not gate.admits()
    with pytest.raises(GateError, match="3 groups are live and at most 3"):
        gate.add()
    gate.take([0, 0])
    assert not gate.admits()  # the depth bounds what is ahead of training: one group is, one is allowed
    gate.seal()
    gate.announce()
    assert gate.admits()


def test_bound_zero_admits_only_what_the_current_version_trains() -> None:
    gate = StalenessGate(settings(b=2, k=2, bound=0))
    for _ in range(4):
        gate.add()
    assert not gate.admits()
    gate.take([0, 0])
    gate.take([0, 0])
    assert not gate.admits()  # nothing may start between the last take and the publication
    assert gate.seal() == gate.announce() == 1
    assert gate.admits()


def test_given_up_group_frees_its_place() -> None:
    gate = StalenessGate(settings(b=1, bound=0))
    start = gate.add()
    assert not gate.admits()
    gate.remove(start)
    assert gate.admits()


def test_fresh_batch_waits_for_older_groups_that_have_no_other_place() -> None:
    gate = StalenessGate(settings(b=2, bound=1), version=1, starts=[0, 1, 1])
    # The group of version 0 has to be in the batch of version 1.
    assert not gate.can_take([1, 1])
    with pytest.raises(GateError, match="cannot be taken"):
        gate.take([1, 1])
    assert gate.can_take([0, 1])


def test_risen_start_lets_a_waiting_batch_go() -> None:
    gate = StalenessGate(settings(b=2, bound=1), version=1, starts=[0, 1, 1])
    gate.move(0, 1)
    assert gate.can_take([1, 1])


@pytest.mark.parametrize(("old", "new"), [(1, 0), (1, 3), (0, 1)])
def test_start_never_falls_nor_passes_the_version_nor_moves_without_a_group(old: int, new: int) -> None:
    gate = StalenessGate(settings(bound=2), version=2, starts=[1])
    with pytest.raises(GateError, match="start"):
        gate.move(old, new)
    assert gate.starts() == {1: 1}


def test_batch_is_b_live_groups_of_a_version_with_batches_left() -> None:
    gate = StalenessGate(settings(b=2, bound=2), starts=[0, 0, 0, 0])
    assert not gate.can_take([0])
    assert not gate.can_take([0, 0, 0])
    assert not gate.can_take([0, 1])
    gate.take([0, 0])
    assert not gate.can_take([0, 0])  # k = 1: the version is trained, its successor is not sealed


def test_version_is_sealed_only_when_all_its_batches_are_taken() -> None:
    gate = StalenessGate(settings(b=1, k=2, bound=1), starts=[0, 0])
    with pytest.raises(GateError, match="still has 2 batches"):
        gate.seal()
        gate.announce()
    gate.take([0])
    with pytest.raises(GateError, match="still has 1 batches"):
        gate.seal()
        gate.announce()
    gate.take([0])
    assert gate.seal() == gate.announce() == 1
    assert gate.batches_left == 2


def test_what_is_sealed_and_not_announced_admits_groups_of_the_version_before_only_while_they_have_places() -> None:
    gate = StalenessGate(settings(b=2, bound=2, depth=1))
    for _ in range(4):
        gate.add()
    gate.take([0, 0])
    assert gate.seal() == 1
    # Places until their deadline: a batch each of versions 1 and 2. The depth: one version ahead of the one trained.
    assert (gate.announced, gate.admission_limit, gate.slots(0)) == (0, 4, 4)
    assert [gate.add(), gate.add()] == [0, 0]
    assert not gate.admits()
    gate.take([0, 0])
    assert gate.seal() == 2
    assert (gate.admission_limit, gate.slots(0)) == (2, 2)
    assert gate.announce() == 1
    assert gate.admission_limit == 4
    assert gate.add() == 1
    with pytest.raises(GateError, match="at most to version 1"):
        gate.move(1, 2)


def test_bound_zero_admits_nothing_before_the_sealed_version_is_announced() -> None:
    gate = StalenessGate(settings(b=1, bound=0), starts=[0])
    gate.take([0])
    gate.seal()
    assert not gate.admits()
    assert gate.announce() == 1
    assert gate.admits()
    with pytest.raises(GateError, match="version 1 has been announced already"):
        gate.announce()


def test_state_that_breaks_the_invariant_is_refused() -> None:
    with pytest.raises(StalenessViolation, match="2 live groups have start version 0 or older, but only 1 groups can"):
        StalenessGate(settings(b=1, bound=1), version=1, starts=[0, 0])
    with pytest.raises(GateError, match="has start version 2"):
        StalenessGate(settings(b=1, bound=1), version=1, starts=[0, 2])
    with pytest.raises(GateError, match="batches are taken"):
        StalenessGate(settings(k=1), batches_taken=2)
    with pytest.raises(SettingError, match="version"):
        StalenessGate(settings(), version=-1)
    with pytest.raises(SettingError, match="batches_taken"):
        StalenessGate(settings(), batches_taken=-1)


@pytest.mark.parametrize(
    "call",
    [lambda gate: gate.remove(1), lambda gate: gate.move(0, 1), lambda gate: gate.announce()],
    ids=["remove", "move", "announce"],
)
def test_state_that_somebody_else_broke_is_noticed_at_the_next_change(call: Callable[[StalenessGate], object]) -> None:
    gate = StalenessGate(settings(b=1, bound=1), version=1, starts=[0, 1])
    gate.version = 2  # not sealed
    with pytest.raises(StalenessViolation, match="live groups have start version"):
        call(gate)


def test_removing_a_group_that_is_not_live_is_refused() -> None:
    gate = StalenessGate(settings(), starts=[0])
    gate.remove(0)
    with pytest.raises(GateError, match="no live group has start version 0"):
        gate.remove(0)

# SPDX-License-Identifier: Apache-2.0
"""What has changed since a checkpoint is said, and refused by name where the run cannot go on with it."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_engine.core.errors import SnapshotError
from recipe.async_engine.core.snapshots import BATCH, RULES, Changed, changes

SAVED: dict[str, Any] = {name: 4 for name in RULES}
OF_RULE = {kind: [name for name, rule in RULES.items() if rule is kind] for kind in Changed}


def test_same_settings_have_no_changes() -> None:
    assert changes(SAVED, dict(SAVED), live=3) == []


@pytest.mark.parametrize("name", OF_RULE[Changed.REFUSED])
@pytest.mark.parametrize("live", [0, 3])
def test_setting_that_decides_what_is_trained_when_is_refused_with_both_values(name: str, live: int) -> None:
    with pytest.raises(SnapshotError) as refusal:
        changes(SAVED, {**SAVED, name: 5}, live)
    assert f"{name} = 5, but the checkpoint was made with 4. Resume with the values" in str(refusal.value)


@pytest.mark.parametrize("name", OF_RULE[Changed.REFUSED_WITH_ANSWERS])
def test_setting_that_shapes_answers_is_refused_only_where_there_are_some(name: str) -> None:
    with pytest.raises(SnapshotError, match="= 5, but the checkpoint was made with 4"):
        changes(SAVED, {**SAVED, name: 5}, live=1)
    assert changes(SAVED, {**SAVED, name: 5}, live=0) == [f"{name}: 4 -> 5"]


@pytest.mark.parametrize("name", OF_RULE[Changed.NOTED])
def test_setting_that_a_run_can_go_on_with_is_noted(name: str) -> None:
    assert changes(SAVED, {**SAVED, name: 5}, live=3) == [f"{name}: 4 -> 5"]


def test_all_that_is_refused_is_named_at_once() -> None:
    with pytest.raises(SnapshotError, match=r"groups of a batch .*; data\.seed = 7, "):
        changes(SAVED, {**SAVED, BATCH: 5, "data.seed": 7}, live=0)


def test_what_a_checkpoint_does_not_say_is_not_held_against_it() -> None:
    assert changes({}, SAVED, live=3) == []

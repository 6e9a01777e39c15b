# SPDX-License-Identifier: Apache-2.0
"""Users' values as plain ones, and their exceptions as text. The odd ones of each kind: tests/odd_rewards.py."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.plain import MOST, NotPlain, origin, plain, told, traced

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**300), 10**300) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers()
    | st.fractions()
    | st.decimals()
    | st.dates()
    | st.builds(object)
    | st.just(len)
    | st.just(type),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner, max_size=4)
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)


@given(PLAIN)
def test_plain_values_stay_as_they_are(value: Any) -> None:
    found = plain(value, "it")
    assert same(json.loads(json.dumps(found)), found)
    if "\0" not in repr(value) and "\\x00" not in repr(value):
        assert same(found, value)


@given(ANY)
def test_whatever_a_value_is_json_has_it_or_its_place_is_named(value: Any) -> None:
    try:
        found = plain(value, "it")
    except NotPlain as error:
        assert str(error).startswith("it")
    else:
        assert same(json.loads(json.dumps(found)), found)
        json.dumps(found, ensure_ascii=False).encode()


def test_place_of_what_is_refused_is_named() -> None:
    with pytest.raises(NotPlain, match=r"^report\['parts'\]\[1\]\['judge'\] is of type object"):
        plain({"parts": [1, {"judge": object()}]}, "report")


def test_size_is_bounded_over_all_parts() -> None:
    part = "x" * (MOST // 4)
    plain([part] * 3, "it")
    with pytest.raises(NotPlain, match=r"^it\[3\] is too large"):
        plain([part] * 4, "it")


@given(st.text(st.characters()), st.sampled_from([ValueError, SystemExit, KeyboardInterrupt, OSError, StopIteration]))
def test_errors_are_told_and_can_be_written(message: str, kind: type[BaseException]) -> None:
    for text in (told(kind(message)), traced(kind(message))):
        text.encode()
        assert kind.__name__ in text


def test_first_cause_of_a_chain_is_told_and_where_it_arose() -> None:
    try:
        try:
            raise ModuleNotFoundError("No module named 'x'")
        except ModuleNotFoundError as inner:
            raise RuntimeError("cannot load") from inner
    except RuntimeError as error:
        assert told(error) == "RuntimeError: cannot load (caused by ModuleNotFoundError: No module named 'x')"
        assert origin(error).startswith(f"ModuleNotFoundError: No module named 'x', {__file__}:")
    assert origin(ValueError("alone")) == ""


def test_numbers_of_libraries_are_floats() -> None:
    assert plain({"a": math.nan, "b": -0.0}, "it")["b"] == 0

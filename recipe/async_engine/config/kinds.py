# SPDX-License-Identifier: Apache-2.0
"""Refuses values of another kind than verl's own: text for a number, a list for a section, a value that is missing.

Contract: verl's types accept any value of most settings, so that text in place of a number fails in the first update.
What a setting must be, where `verl_types` does not say, is told by the value that it has in verl's configuration: a
number, a truth value (0 and 1 too), a list, a section, or text (any other single value, and a list). null is left to
verl, and so is a setting that is null there. Shown by tests/config/test_verdicts.py.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from recipe.async_engine.config.fields import is_number, render
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.verl_types import EXPECTED

MISSING = "???"
# Numbers, or two as text; learning.py has their limits. A name, or a list of them.
OTHERWISE = ("_threshold", "trainer.logger")


def of_another_kind(config: Mapping[str, Any], defaults: Mapping[str, Any], above: str = "") -> Iterator[Problem]:
    """The settings whose values are; ``defaults``: what verl has."""
    for name, usual in defaults.items():
        setting, value = f"{above}{name}", config.get(name)
        if value is None or setting.endswith(OTHERWISE):
            continue
        if value == MISSING and usual != MISSING:
            yield Problem(setting, MISSING, "a value", "It is missing: give it, or remove the setting.")
        elif isinstance(usual, Mapping) and isinstance(value, Mapping):
            yield from of_another_kind(value, usual, f"{setting}.")
        elif setting not in EXPECTED and (kind := _kind(usual)) is not None and not kind[1](value):
            advice = f"verl's own is {render(usual)}; correct the value, or remove the setting."
            yield Problem(setting, render(value), kind[0], advice)


def _kind(usual: Any) -> tuple[str, Callable[[Any], bool]] | None:
    """What a value has to be, in words and as a test; None where verl's own does not say."""
    match usual:
        case bool():
            return "true or false", lambda value: isinstance(value, bool) or value in (0, 1)
        case int() | float():
            return "a number", lambda value: is_number(value) and -math.inf < value < math.inf
        case Mapping():
            return "a section of settings", lambda value: isinstance(value, Mapping)
        case list():
            return "a list", lambda value: isinstance(value, list | tuple)
        case str() if not usual.startswith("${"):
            return "text", lambda value: not isinstance(value, Mapping)
    return None

# SPDX-License-Identifier: Apache-2.0
"""Typed config sections: one declaration of each setting serves reading, checking and documentation.

A section is a frozen dataclass whose fields are made by `field`. `read_section` builds it from a plain mapping and
reports every fault at once: unknown keys (with the closest known name), wrong types, values out of range.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from recipe.async_engine.config.problems import Problem

Section = TypeVar("Section")


def field(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    instead: str = "",
) -> Any:
    """A documented setting: `minimum` is inclusive, `above` exclusive; ``instead``: what to use for other values."""
    limits = {"minimum": minimum, "above": above, "choices": tuple(choices), "instead": instead}
    return dataclasses.field(default=default, metadata={"meaning": meaning, "unit": unit, **limits})


def seconds(default: float, meaning: str) -> Any:
    """A deadline."""
    return field(default, meaning, unit="s", above=0)


def subsection(cls: type[Any], meaning: str) -> Any:
    """A nested section, at its defaults where the mapping has none."""
    return dataclasses.field(default_factory=cls, metadata={"meaning": meaning})


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number, which a truth value is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def render(value: object) -> str:
    """A value as a config file writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def field_types(cls: type[Any]) -> dict[str, tuple[type[Any], ...]]:
    """The types a setting accepts, by name; `NoneType` among them if it may be null."""
    return {name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(cls).items()}


def allowed_values(field: dataclasses.Field[Any], accepted: tuple[type[Any], ...]) -> str:
    """What a setting accepts, in words."""
    limits = field.metadata
    if limits["choices"]:
        words = " or ".join(limits["choices"])
    else:
        words = " or ".join(_TYPE_NAMES[item] for item in accepted if item is not types.NoneType)
    if limits["minimum"] is not None:
        words += f" >= {limits['minimum']:g}"
    if limits["above"] is not None:
        words += f" > {limits['above']:g}"
    return f"{words}, or null" if types.NoneType in accepted else words


_TYPE_NAMES: dict[type[Any], str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _has_type(value: object, accepted: tuple[type[Any], ...]) -> bool:
    return type(value) in accepted or (type(value) is int and float in accepted)


def _in_range(value: Any, limits: Mapping[str, Any]) -> bool:
    if value is None:
        return True
    if limits["choices"]:
        return render(value) in limits["choices"]
    if not isinstance(value, int | float):
        return True
    least, above = limits["minimum"], limits["above"]
    return math.isfinite(value) and (least is None or value >= least) and (above is None or value > above)


def read_section(cls: type[Section], mapping: Mapping[str, Any] | None, path: str) -> tuple[Section, list[Problem]]:
    """Build a section from a mapping found at `path`.

    Returns the section and the problems found; a setting with a problem has its default in the section, so that
    checks across settings can go on.
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        return cls(), [Problem(path, render(mapping), "a section of settings", "Give its settings one by one.")]
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = dict(mapping or {})
    problems = list(_unknown_keys(given, fields, path))
    values: dict[str, Any] = {}
    accepted = field_types(cls)
    for name in fields.keys() & given.keys():
        field, value, setting = fields[name], given[name], f"{path}.{name}"
        if dataclasses.is_dataclass(accepted[name][0]):
            values[name], nested = read_section(accepted[name][0], value, setting)
            problems += nested
        elif _has_type(value, accepted[name]) and _in_range(value, field.metadata):
            values[name] = float(value) if accepted[name][0] is float and value is not None else value
        else:
            allowed = allowed_values(field, accepted[name])
            advice = field.metadata["instead"] or f"The default is {render(field.default)}."
            problems.append(Problem(setting, render(value), allowed, advice))
    return cls(**values), sorted(problems, key=lambda problem: problem.setting)


GONE = {"async_training.weights.encoding": "Versions travel as a whole now, as with encoding=full. Remove it."}
"""What to say of settings that were there before."""


def _unknown_keys(
    given: Mapping[str, Any], fields: Mapping[str, dataclasses.Field[Any]], path: str
) -> Iterator[Problem]:
    for key in given.keys() - fields.keys():
        close = difflib.get_close_matches(key, list(fields), n=1)
        advice = GONE.get(f"{path}.{key}") or (f"Did you mean {path}.{close[0]}?" if close else "Remove it.")
        yield Problem(f"{path}.{key}", render(given[key]), f"one of {', '.join(fields)}", advice)

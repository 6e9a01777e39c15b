# SPDX-License-Identifier: Apache-2.0
"""Declares and reads the settings of this package. pydantic checks them; its errors are reworded for users.

Contract: a section is a frozen pydantic dataclass with the configuration `STRICT`. Each of its fields is declared by a
call of `setting`, the only place with the setting's default, unit, limits and meaning. `read_section` reports all
faults of a section at once, each with the setting, its value, the allowed values and what to change; for a removed
setting, the advice names the replacement. Shown by tests/config/test_config.py.
"""

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin

from pydantic import ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from recipe.async_engine.config.legacy import REMOVED
from recipe.async_engine.config.problems import Problem, render

Section = TypeVar("Section")
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def setting(default: Any, meaning: str, *, unit: str = "", instead: str = "", **limits: Any) -> Any:
    """Declare a setting.

    ``meaning`` is the text in docs/configuration.md. ``instead`` says what to change if a value is refused; if it is
    empty, the error names the default. ``limits`` are pydantic's, such as ``ge`` (least value) or ``gt``.
    """
    extra: Any = {"unit": unit, "instead": instead}
    return Field(default=default, description=meaning, json_schema_extra=extra, **limits)


def seconds(default: float, meaning: str) -> Any:
    return setting(default, meaning, unit="s", gt=0)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether the value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether the value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def settings_of(cls: Any) -> dict[str, FieldInfo]:
    """Return pydantic's description of each setting of a section class, by the setting's name."""
    return dict(cls.__pydantic_fields__)


def accepted_types(info: FieldInfo) -> tuple[Any, ...]:
    """Return the alternatives of a setting's type annotation: ``int | None`` gives ``(int, NoneType)``."""
    parts = () if get_origin(info.annotation) is Literal else get_args(info.annotation)
    return parts or (info.annotation,)


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def allowed_values(info: FieldInfo) -> str:
    """Return a phrase that says which values a setting accepts."""
    parts = [part for part in accepted_types(info) if part is not types.NoneType]
    words = " or ".join(_WORDS[part] if part in _WORDS else " or ".join(get_args(part)) for part in parts)
    for limit in info.metadata:
        for name, sign in (("ge", ">="), ("gt", ">")):
            if (bound := getattr(limit, name, None)) is not None:
                words += f" {sign} {bound:g}"
    return f"{words}, or null" if types.NoneType in accepted_types(info) else words


def read_section(cls: type[Section], mapping: Mapping[str, Any] | None, path: str) -> tuple[Section, list[Problem]]:
    """Build the section ``cls`` from ``mapping``; ``path`` is the name of the section in the configuration.

    Returns:
        The section and the problems found. A setting with a problem keeps its default in the section, so that rules
        about several settings can still be applied.
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        return cls(), [Problem(path, render(mapping), "a section of settings", "Give its settings one by one.")]
    values = {str(name): value for name, value in (mapping or {}).items()}
    known, problems = settings_of(cls), []
    for name, info in known.items():
        if name in values and dataclasses.is_dataclass(info.annotation):
            values[name], more = read_section(info.annotation, values[name], f"{path}.{name}")
            problems += more
    while True:
        try:
            return cls(**values), sorted(problems, key=lambda problem: problem.setting)
        except ValidationError as error:
            for name in {str(found["loc"][0]) for found in error.errors(include_url=False)}:
                problems.append(_problem(known, name, values.pop(name), path))


def _problem(known: Mapping[str, FieldInfo], name: str, value: Any, path: str) -> Problem:
    """Return the problem of a setting that pydantic refuses, because its value or its name is not allowed."""
    setting = f"{path}.{name or repr(name)}"
    if name in known:
        extra: Any = known[name].json_schema_extra
        advice = extra["instead"] if extra else ""
        return Problem(
            setting,
            render(value),
            allowed_values(known[name]),
            advice or f"The default is {render(known[name].default)}.",
        )
    if setting in REMOVED:
        return Problem(setting, render(value), *REMOVED[setting])
    close = difflib.get_close_matches(name, list(known), n=1)
    advice = f"Did you mean {path}.{close[0]}?" if close else "Remove it."
    return Problem(setting, render(value), f"one of {', '.join(known)}", advice)

# SPDX-License-Identifier: Apache-2.0
"""Looks up settings by their dotted names, and reports all problems of a configuration in one error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.core.errors import RecipeError


def lookup(config: Mapping[str, Any], setting: str, default: Any = None) -> Any:
    """Return the value at a dotted path, or ``default`` if a part of the path is missing."""
    node: Any = config
    for part in setting.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def render(value: object) -> str:
    """Return a value as YAML writes it: ``null``, ``true``."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Problem:
    """One setting whose value is refused."""

    setting: str  # dotted path of the setting, as on the command line
    value: str  # the value as YAML writes it
    allowed: str  # the accepted values, in words
    advice: str  # what to change

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: allowed is {self.allowed}. {self.advice}"


class ConfigError(RecipeError, ValueError):
    """A configuration is refused before any process starts; `problems` has one entry for each fault."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"The configuration has {len(self.problems)} {noun}:{lines}")

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        # Unpickling calls the class with `args`, the message; this class needs the problems instead.
        return (ConfigError, (self.problems,))

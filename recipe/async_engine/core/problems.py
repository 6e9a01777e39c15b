# SPDX-License-Identifier: Apache-2.0
"""Problems found in a configuration, and the one error that reports all of them at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from recipe.async_engine.core.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Problem:
    """One setting that cannot be used.

    Attributes:
        setting: The dotted path of the setting, as written on the command line.
        value: Its value, rendered.
        allowed: What would be accepted.
        advice: What to change.
    """

    setting: str
    value: str
    allowed: str
    advice: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: allowed is {self.allowed}. {self.advice}"


class ConfigError(RecipeError, ValueError):
    """A configuration that is refused before any process starts; `problems` has one entry for each fault."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = [
            f"The configuration has {len(self.problems)} {noun}:",
            *(f"  - {problem}" for problem in self.problems),
        ]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        # Exceptions are rebuilt from `args` when they cross processes; ours are built from problems.
        return (ConfigError, (self.problems,))

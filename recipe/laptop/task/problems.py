# SPDX-License-Identifier: Apache-2.0
"""The problems of the built-in task, such as "flip 40518": an instruction and a string of distinct digits.

Each problem has one right answer. No digit string occurs in both the training and the validation set, not even with
different instructions. All functions are pure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from recipe.laptop.task.settings import TaskSettings

DIGITS = "0123456789"
KEY_LENGTH = 5
SHORT_OPERATIONS = ("sort", "flip", "copy")
LONG_OPERATION = "list"
# The right answer to the instruction ``list`` has each of the five digits followed by each of these letters: 5 * 12 * 2
# = 120 characters.
LIST_LETTERS = "abcdefghijkl"
# With ``lengths=long_tail``, one of every LONG_PERIOD problems, the one at the index LONG_OFFSET, has a long answer.
LONG_PERIOD, LONG_OFFSET = 20, 10


@dataclass(frozen=True)
class Problem:
    """One problem: apply the instruction ``operation`` to ``key``, a string of five distinct digits."""

    operation: str
    key: str

    @property
    def prompt(self) -> str:
        return f"{self.operation} {self.key}"

    @property
    def answer(self) -> str:
        return apply_operation(self.operation, self.key)


def apply_operation(operation: str, key: str) -> str:
    """Return the right answer to the instruction ``operation`` for the digit string ``key``."""
    if operation == "sort":
        return "".join(sorted(key))
    if operation == "flip":
        return key[::-1]
    if operation == "copy":
        return key
    assert operation == LONG_OPERATION
    return "".join(digit + letter for digit in key for letter in LIST_LETTERS)


def draw_key(rng: random.Random) -> str:
    return "".join(rng.sample(DIGITS, KEY_LENGTH))


def make_splits(settings: TaskSettings) -> tuple[list[Problem], list[Problem]]:
    """Return the training problems and the validation problems of a task, each in the order of the data file."""
    rng = random.Random(f"problems-{settings.seed}")
    total = settings.train_size + settings.val_size
    # Use a dict as a set, because it keeps the order of insertion. The order of a set of strings would differ between
    # processes.
    keys: dict[str, None] = {}
    while len(keys) < total:
        keys[draw_key(rng)] = None
    ordered = list(keys)

    def problem(index: int, key: str) -> Problem:
        is_long = settings.lengths == "long_tail" and index % LONG_PERIOD == LONG_OFFSET
        return Problem(LONG_OPERATION if is_long else SHORT_OPERATIONS[index % len(SHORT_OPERATIONS)], key)

    train, val = ordered[: settings.train_size], ordered[settings.train_size :]
    return [problem(*item) for item in enumerate(train)], [problem(*item) for item in enumerate(val)]

# SPDX-License-Identifier: Apache-2.0
"""The problems of the built-in task: an instruction over a string of distinct digits, and its one right answer.

Pure. ``make_splits`` keeps training and validation disjoint by digit string, whatever the instruction, so that the warm
start can leave out the strings of the validation set too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from recipe.laptop.task.settings import TaskSettings

DIGITS = "0123456789"
KEY_LENGTH = 5
SHORT_OPERATIONS = ("sort", "flip", "copy")
LONG_OPERATION = "list"
# ``list`` writes each digit of the string with each of these: 5 * 2 * 12 = 120 characters.
LIST_LETTERS = "abcdefghijkl"
# In a long-tailed task the problem at this offset of every 20 is a long one.
LONG_PERIOD, LONG_OFFSET = 20, 10


@dataclass(frozen=True)
class Problem:
    """One prompt: ``operation`` applied to ``key``, five distinct digits."""

    operation: str
    key: str

    @property
    def prompt(self) -> str:
        """The user's message."""
        return f"{self.operation} {self.key}"

    @property
    def answer(self) -> str:
        """The only answer that scores."""
        return apply_operation(self.operation, self.key)


def apply_operation(operation: str, key: str) -> str:
    """Return the right answer to ``operation`` over ``key``."""
    if operation == "sort":
        return "".join(sorted(key))
    if operation == "flip":
        return key[::-1]
    if operation == "copy":
        return key
    assert operation == LONG_OPERATION
    return "".join(digit + letter for digit in key for letter in LIST_LETTERS)


def draw_key(rng: random.Random) -> str:
    """Draw five distinct digits in random order."""
    return "".join(rng.sample(DIGITS, KEY_LENGTH))


def make_splits(settings: TaskSettings) -> tuple[list[Problem], list[Problem]]:
    """Return the training and validation problems of a task, in file order."""
    rng = random.Random(f"problems-{settings.seed}")
    total = settings.train_size + settings.val_size
    # A dict keeps the order of insertion, whereas that of a set of strings differs between processes.
    keys: dict[str, None] = {}
    while len(keys) < total:
        keys[draw_key(rng)] = None
    ordered = list(keys)

    def problem(index: int, key: str) -> Problem:
        is_long = settings.lengths == "long_tail" and index % LONG_PERIOD == LONG_OFFSET
        return Problem(LONG_OPERATION if is_long else SHORT_OPERATIONS[index % len(SHORT_OPERATIONS)], key)

    train, val = ordered[: settings.train_size], ordered[settings.train_size :]
    return [problem(*item) for item in enumerate(train)], [problem(*item) for item in enumerate(val)]

# SPDX-License-Identifier: Apache-2.0
"""A data set of a user's whose rows are odd in every way that costs a prompt, and in some that cost nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from verl.utils.dataset.rl_dataset import RLHFDataset


class TwoArguments(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Own:
    """What a row may have of the user's file."""


def torn(row: dict[str, Any]) -> Any:
    raise TwoArguments("torn", "lost")


LOST: tuple[Callable[[dict[str, Any]], Any], ...] = (
    torn,
    lambda row: None,
    lambda row: sys.exit(3),
    lambda row: {**row, "lock": threading.Lock()},
    lambda row: {**row, "why": TwoArguments("one", "two")},
    lambda row: {name: value for name, value in row.items() if name != "raw_prompt"},
    lambda row: {**row, "sampling_params": {}},
)
HARMLESS: tuple[Callable[[dict[str, Any]], Any], ...] = (
    lambda row: row,
    lambda row: {**row, "check": lambda answer: True, "own": Own()},
    lambda row: {**row, "hint": "a hint", "agent_name": None, "responses": "x", "values": [1]},
    lambda row: {**row, "embedding": torch.zeros(3, dtype=torch.float16)},
)
EVERY = 3


def is_lost(index: int) -> bool:
    return index % EVERY == 0


class OddRows(RLHFDataset):
    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index)
        kinds = LOST if is_lost(index) else HARMLESS
        return kinds[index // EVERY % len(kinds)](row)

# SPDX-License-Identifier: Apache-2.0
"""The settings from which a built-in task is created, and the paths of its files.

Two tasks with equal ``TaskSettings`` and ``FORMAT_VERSION`` have the same data and, if created on the same machine with
the same library versions, the same weights (tests/integration/test_builtin_task.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# A format version, which is stored in every task's manifest. Increase it with any change of data, tokenizer, model or
# warm start, so that existing tasks are created anew.
FORMAT_VERSION = 1

FAMILIES = ("qwen3", "qwen2")
LENGTHS = ("uniform", "long_tail")
# Largest number of problems in a data set. Only 30,240 digit strings exist, and the warm start needs many that are not
# in the validation set.
MAX_PROBLEMS = 20_000


@dataclass(frozen=True)
class TaskSettings:
    """Settings of the built-in task.

    Attributes:
        seed: seed of the problems, the initial weights and the warm start.
        family: architecture of the model, ``qwen3`` or ``qwen2``.
        lengths: ``uniform`` (every answer has 6 tokens, including the end token) or ``long_tail`` (one prompt in 20 has
            an answer of 121 tokens).
        train_size, val_size: numbers of prompts; the two sets have no digit string in common.

    Raises:
        ValueError: a value is not allowed.
    """

    seed: int = 0
    family: str = "qwen3"
    lengths: str = "uniform"
    train_size: int = 4096
    val_size: int = 256

    def __post_init__(self) -> None:
        for name, allowed in (("family", FAMILIES), ("lengths", LENGTHS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; set it to one of {', '.join(allowed)}")
        for name in ("train_size", "val_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; raise {name}")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0; set a seed >= 0")
        if self.train_size + self.val_size > MAX_PROBLEMS:
            raise ValueError(
                f"train_size={self.train_size} and val_size={self.val_size} together must be at most {MAX_PROBLEMS}; "
                "lower train_size"
            )


@dataclass(frozen=True)
class TaskPaths:
    """Paths of a complete task: a Hugging Face model's folder, two parquet files, and the reward's source file."""

    model: Path
    train: Path
    val: Path
    reward_file: Path

# SPDX-License-Identifier: Apache-2.0
"""Problems as parquet files in verl's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipe.async_engine.task.problems import Problem

DATA_SOURCE = "recipe/digits"


def to_row(problem: Problem, index: int, split: str) -> dict[str, Any]:
    """One row: the columns that verl's ``RLHFDataset`` and reward loop read."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "instruction_following",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split, "operation": problem.operation},
    }


def write_parquet(problems: list[Problem], split: str, path: Path) -> None:
    """Writes ``problems`` to ``path``; equal problems give equal bytes."""
    import pyarrow
    from pyarrow import parquet

    rows = [to_row(problem, index, split) for index, problem in enumerate(problems)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)

# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
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

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
"""Facts about the world outside a configuration, gathered by a shell and judged by `validate`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Resources:
    """What a cluster, or this machine, has to place workers on.

    Attributes:
        accelerators: Places for a trainer rank or a part of a rollout replica; on a CPU, Ray's logical count.
    """

    accelerators: int


@dataclass(frozen=True, slots=True)
class RowFault:
    """Rows of a data file that cannot be used.

    Attributes:
        column: Where the fault is.
        what: What it is.
        first: The first such row, from 0.
        count: How many rows have it, at least.
        most: Of prompts that are too long, the tokens of the longest one.
    """

    column: str
    what: Literal["empty", "too long"]
    first: int
    count: int
    most: int = 0


@dataclass(frozen=True, slots=True)
class FileFact:
    """What was found at a path that a setting names.

    Attributes:
        setting: The setting that names it.
        path: The path as configured.
        kind: What it should be: a model, a data file, a file of Python code, or the reward of programming tasks.
        fault: Why it cannot be used (`does not exist`, ...), or None.
        rows: Rows of a data file, where known.
        columns: Columns of a data file, where known.
        row_faults: Rows of a data file that cannot be used.
        largest_tensor: Name and number of elements of a model's largest tensor, where known and needed.
    """

    setting: str
    path: str
    kind: Literal["model", "data", "code", "programs"]
    fault: str | None = None
    rows: int | None = None
    columns: tuple[str, ...] | None = None
    largest_tensor: tuple[str, int] | None = None
    row_faults: tuple[RowFault, ...] = ()

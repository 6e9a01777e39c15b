# SPDX-License-Identifier: Apache-2.0
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

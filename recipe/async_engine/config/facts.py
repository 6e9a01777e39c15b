# SPDX-License-Identifier: Apache-2.0
"""What was found outside of a configuration: on nodes, in files. `inspection` finds it and the rules judge it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

TRAIN_FILES, VAL_FILES = "data.train_files", "data.val_files"
VERLS_MANAGERS = ("dapo", "gdpo", "naive", "rate_limited", "remote")
"""verl's own reward managers, which read the ground truth from a row's `reward_model`."""
VERLS_LOOPS = ("single_turn_agent", "tool_agent")
"""verl's own agent loops, which accept only lists of messages as prompts."""


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """What Ray counts on one node."""

    accelerators: int
    cpus: float


@dataclass(frozen=True, slots=True)
class Resources:
    """What a cluster, or this machine, has to place workers on."""

    accelerators: int | None  # how many, where known; on a CPU, Ray's logical count
    device_bytes: int | None = None  # memory of the smallest accelerator, where known
    nodes: tuple[NodeRoom, ...] = ()  # where known
    absent: frozenset[str] = frozenset()  # modules of `packages` that were looked for and not found

    @classmethod
    def of(cls, nodes: Iterable[NodeRoom], device_bytes: int | None = None) -> "Resources":
        """Return what all nodes have together."""
        nodes = tuple(nodes)
        return cls(sum(node.accelerators for node in nodes), device_bytes, nodes)


@dataclass(frozen=True, slots=True)
class NodeFact:
    """What one node of a cluster has answered about itself."""

    address: str
    error: str | None = None  # why it did not answer, as the end of a sentence
    recipe: str | None = None  # this package's version there, None if it cannot be imported
    verl: str | None = None
    routes: tuple[str, ...] = ()  # the ways by which `import verl` loads this package there
    faults: tuple[tuple[str, str, str], ...] = ()  # setting, path, why it cannot be read there
    absent: tuple[str, ...] = ()  # modules that were looked for and not found
    sees_folder: bool = True  # whether it sees a file that the main has just written to trainer.default_local_dir


@dataclass(frozen=True, slots=True)
class RowFault:
    """Rows of a data file that cannot be used."""

    column: str
    what: Literal["empty", "too long", "text", "missing", "no mapping"]
    first: int  # the first such row, from 0
    count: int  # at least this many rows have the fault
    most: int | None = None  # the tokens of the longest prompt, if prompts are too long


@dataclass(frozen=True, slots=True)
class FileFact:
    """What was found at a path that a setting names."""

    setting: str
    path: str  # as configured
    # A description is a YAML file of agent loops or tools.
    kind: Literal["model", "checkpoint", "data", "code", "description", "folder", "module", "written"]
    fault: str | None = None  # why it cannot be used, as the end of a sentence: "does not exist"
    rows: int | None = None  # the rows of a data file, where known
    columns: tuple[str, ...] | None = None  # the columns of a data file, or the names in a description, where known
    largest_tensor: tuple[str, int] | None = None  # a model's: name and number of elements, where known and needed
    row_faults: tuple[RowFault, ...] = ()
    model_config: Mapping[str, Any] | None = None  # a model's config.json, where it could be read

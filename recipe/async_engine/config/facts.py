# SPDX-License-Identifier: Apache-2.0
"""Facts about the world outside a configuration, gathered by a shell and judged by `validate`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

TRAIN_FILES, VAL_FILES = "data.train_files", "data.val_files"
VERLS_MANAGERS = ("dapo", "gdpo", "naive", "rate_limited", "remote")
"""Of rewards; they take a row's `reward_model` apart."""
VERLS_LOOPS = ("single_turn_agent", "tool_agent")
"""The agent loops that verl brings, which take messages alone."""


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """What Ray counts on one node."""

    accelerators: int
    cpus: float


@dataclass(frozen=True, slots=True)
class Resources:
    """What a cluster, or this machine, has to place workers on."""

    # Places for a trainer rank or a part of a rollout replica, where known; on a CPU, Ray's logical count.
    accelerators: int | None
    device_bytes: int | None = None  # memory of the smallest accelerator, where known
    nodes: tuple[NodeRoom, ...] = ()  # where known
    absent: frozenset[str] = frozenset()  # modules of `packages` that were looked for and are not there

    @classmethod
    def of(cls, nodes: Iterable[NodeRoom], device_bytes: int | None = None) -> "Resources":
        """Of all nodes together."""
        nodes = tuple(nodes)
        return cls(sum(node.accelerators for node in nodes), device_bytes, nodes)


@dataclass(frozen=True, slots=True)
class NodeFact:
    """What one node of a cluster has answered about itself."""

    address: str
    error: str | None = None  # why it did not answer
    recipe: str | None = None  # this package's version, None where it cannot be imported
    verl: str | None = None
    routes: tuple[str, ...] = ()  # by which `import verl` loads this package there
    faults: tuple[tuple[str, str, str], ...] = ()  # setting, path, why it cannot be read there
    absent: tuple[str, ...] = ()  # modules that were looked for and are not there
    sees_folder: bool = True  # a file that the main has just written to trainer.default_local_dir


@dataclass(frozen=True, slots=True)
class RowFault:
    """Rows of a data file that cannot be used."""

    column: str
    what: Literal["empty", "too long", "text", "missing", "no mapping"]
    first: int  # the first such row, from 0
    count: int  # how many rows have it, at least
    most: int | None = None  # of prompts that are too long, the tokens of the longest one


@dataclass(frozen=True, slots=True)
class FileFact:
    """What was found at a path that a setting names."""

    setting: str
    path: str  # as configured
    # description: a YAML file of agent loops or tools.
    kind: Literal["model", "checkpoint", "data", "code", "description", "folder", "module", "written"]
    fault: str | None = None  # why it cannot be used ("does not exist")
    rows: int | None = None  # of a data file, where known
    columns: tuple[str, ...] | None = None  # of a data file, where known
    largest_tensor: tuple[str, int] | None = None  # of a model: name and number of elements, where known and needed
    row_faults: tuple[RowFault, ...] = ()
    model_config: Mapping[str, Any] | None = None  # of a model: its config.json, where it could be read

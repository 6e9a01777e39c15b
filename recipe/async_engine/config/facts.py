# SPDX-License-Identifier: Apache-2.0
"""Facts about the files and nodes of a run, which `inspection` collects and the rules of `config.rules` use."""

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
    """The accelerators and CPUs that Ray counts on one node."""

    accelerators: int
    cpus: float


@dataclass(frozen=True, slots=True)
class Resources:
    """The accelerators, CPUs and packages of the cluster, or of this machine if the run is local."""

    # Number of accelerators, if known. On the CPU platform, the logical number that Ray is told.
    accelerators: int | None
    device_bytes: int | None = None  # bytes of memory of the smallest accelerator, if known
    nodes: tuple[NodeRoom, ...] = ()  # accelerators and CPUs of each node, if known
    absent: frozenset[str] = frozenset()  # modules of `packages.MODULES` that are not installed

    @classmethod
    def of(cls, nodes: Iterable[NodeRoom], device_bytes: int | None = None) -> "Resources":
        nodes = tuple(nodes)
        return cls(sum(node.accelerators for node in nodes), device_bytes, nodes)


@dataclass(frozen=True, slots=True)
class NodeFact:
    """The results of the checks on one node of the cluster."""

    address: str
    error: str | None = None  # why the node gave no results, such as "did not answer within 60 s"
    recipe: str | None = None  # version of this package on the node; None if it cannot be imported
    verl: str | None = None  # version of verl on the node
    routes: tuple[str, ...] = ()  # mechanisms by which `import verl` loads this package on the node
    faults: tuple[tuple[str, str, str], ...] = ()  # for each unreadable path: setting, path and reason
    absent: tuple[str, ...] = ()  # modules that are not installed on the node
    # Whether the node sees a file that the main process has just written to trainer.default_local_dir.
    sees_folder: bool = True


@dataclass(frozen=True, slots=True)
class RowFault:
    """A reason why some rows of a data file cannot be used."""

    column: str
    what: Literal["empty", "too long", "text", "missing", "no mapping", "no teacher"]
    first: int  # index of the first row with this fault, from 0
    count: int  # number of rows found with this fault; there may be more
    most: int | None = None  # tokens of the longest prompt, if prompts are too long
    value: str | None = None  # the first row's value, if no teacher has it as its key


@dataclass(frozen=True, slots=True)
class FileFact:
    """The findings of `inspection` about a path or module that a setting names."""

    setting: str
    path: str  # the path as the configuration gives it
    # The kind of the path: a "description" is a YAML file that lists agent loops or tools; a "written" path is a folder
    # that the run creates.
    kind: Literal["model", "checkpoint", "data", "code", "description", "folder", "module", "written"]
    fault: str | None = None  # why the path cannot be used, such as "does not exist"
    rows: int | None = None  # number of rows of a data file, if known
    columns: tuple[str, ...] | None = None  # columns of a data file, or names in a description, if known
    largest_tensor: tuple[str, int] | None = None  # a model's largest tensor: name, number of elements
    row_faults: tuple[RowFault, ...] = ()
    model_config: Mapping[str, Any] | None = None  # the contents of a model's config.json, if it can be read

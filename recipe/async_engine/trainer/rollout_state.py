# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the rollout state in a checkpoint: the ledger, the position in the data and the live groups.

Contract: one file has the ledger, position and groups of the same moment. It is in the checkpoint's folder, is complete
whenever it exists, and is written before the checkpoint is marked as complete (``checkpoints``). A payload is a packed
trajectory; a scheduler's snapshot has only object references to payloads. Payloads are fetched while the file is
written, on any thread, and written from the object store's memory without a copy. In a resumed run, ready groups are
trained as they are, and running groups continue from their saved answers (``kept``). The file is read with
``torch.load``, which unpickles it, so checkpoints must be as trustworthy as the code, like verl's own ``data.pt``.
`Snapshot` describes the content, and `checked` refuses any other content as damaged. Shown by
tests/integration/test_rollout_state.py, test_damaged_files.py and tests/e2e/test_faults.py.
"""

import logging
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import ray
import torch
from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError, with_config
from ray import cloudpickle
from ray.exceptions import ObjectLostError
from typing_extensions import TypedDict

from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.core.errors import SnapshotError
from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import Group, GroupState, Prompt
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import admission_policy
from recipe.async_engine.core.snapshots import STATE_FORMAT
from recipe.async_engine.record import durable
from recipe.async_engine.record.schema import BadFile, said
from recipe.async_engine.rollout.group_run import TrajectoryScored
from recipe.async_engine.rollout.kept_answers import TrajectoryRecord

logger = logging.getLogger(__name__)

ROLLOUT_STATE = "rollout_state.pt"

Number = Annotated[int, Field(ge=0, lt=2**62)]
LiveRow = Annotated[
    tuple[Number, Number, Number, str, Number, Literal["running", "ready"], Number, Number | None],
    BeforeValidator(lambda row: tuple(row) if isinstance(row, list) else row),
]
"""A group of the ledger, in the form that `Group.to_row` returns."""


class LedgerState(TypedDict):
    """The ledger's state, as `SampleLedger.snapshot` returns it."""

    max_staleness: Number
    version: Number
    batches_taken: Number
    issued: Number
    trained: Number
    filtered: dict[str, Number]
    failed: dict[str, Number]
    staleness: list[Annotated[list[Number], Field(min_length=2, max_length=2)]]
    issued_prompts: list[Annotated[list[Number], Field(min_length=3, max_length=3)]]
    trained_prompts: list[Annotated[list[Number], Field(min_length=3, max_length=3)]]
    live: list[LiveRow]


class Position(TypedDict):
    """The position in the data, which `PromptSource.state` returns.

    In checkpoints of earlier versions of this package, ``put_back`` is one prompt or None instead of a list.
    """

    epoch: Number
    taken_in_epoch: Number
    put_back: list[InstanceOf[Prompt]] | InstanceOf[Prompt] | None
    dataloader: dict[str, Any] | None


@with_config(ConfigDict(arbitrary_types_allowed=True))
class LiveGroup(TypedDict):
    """A live group: the data row of its prompt, and lists that have one item for each trajectory."""

    row: dict[str, Any]
    scored: list[InstanceOf[TrajectoryScored] | None]
    payloads: list[InstanceOf[torch.Tensor] | InstanceOf[np.ndarray] | bytes | None]
    kept: list[InstanceOf[TrajectoryRecord] | None]


class Interrupted(TypedDict):
    """Token counts of interrupted answers, with the meanings that the attributes of `TokenAccount` have."""

    cut: Number
    lost: Number
    trained: Number


class Scores(TypedDict):
    """The mean scores of the first and the last validation."""

    first: float | None
    last: float | None


class Snapshot(TypedDict):
    """The rollout state in a checkpoint."""

    format: Literal[1]
    ledger: LedgerState
    source: Position
    groups: dict[int, LiveGroup]
    interrupted_tokens: Interrupted
    made_with: dict[str, Any]
    validation: NotRequired[Scores]
    alarms: NotRequired[dict[str, Number]]


SNAPSHOTS = TypeAdapter(Snapshot)


def new_ledger(plan: RunPlan, snapshot: dict[str, Any] | None = None) -> SampleLedger:
    """Return the ledger of a run, restored from ``snapshot`` if that is given."""
    settings = GateSettings(
        batch_groups=plan.batch_groups,
        batches_per_version=plan.batches_per_version,
        max_staleness=plan.max_staleness,
        pipeline_depth=plan.pipeline_depth,
    )
    rules: dict[str, Any] = {
        "target_groups": plan.total_steps * plan.batch_groups,
        "issue_limit": plan.total_groups,
        "policy": admission_policy(plan.settings.async_training.policy),
    }
    if snapshot is None:
        return SampleLedger(settings, **rules)
    return SampleLedger.restore(snapshot, settings, **rules)


def checked(snapshot: Any) -> dict[str, Any]:
    """Return ``snapshot`` as a dict. Raise `BadFile` if it is not what `save` writes."""
    try:
        SNAPSHOTS.validate_python(snapshot, strict=True)
    except ValidationError as error:
        raise BadFile(f"{ROLLOUT_STATE} has another structure than expected ({said(error)})") from None
    ready = {row[0]: row[5] == GroupState.READY for row in snapshot["ledger"]["live"]}
    if ready.keys() != snapshot["groups"].keys():
        raise BadFile(f"{ROLLOUT_STATE} has other groups than its ledger lists")
    for group_id, group in snapshot["groups"].items():
        payloads = group["payloads"]
        if not len(payloads) == len(group["scored"]) == len(group["kept"]):
            raise BadFile(f"{ROLLOUT_STATE} has lists of different lengths for group {group_id}")
        there = [
            score is not None for score, payload in zip(group["scored"], payloads, strict=True) if payload is not None
        ]
        if not all(there) or (ready[group_id] and len(there) < len(payloads)):
            raise BadFile(f"{ROLLOUT_STATE} lacks answers of group {group_id}")
        for record in group["kept"]:
            if record is not None:
                pickle.loads(record.answers)
    return dict(snapshot)


def save(folder: str, snapshot: dict[str, Any], timeout_s: float) -> None:
    """Write a scheduler's snapshot, with its payloads, into the folder of a checkpoint.

    The payloads must arrive within ``timeout_s`` seconds. If a payload is lost with a node or worker, its group is
    saved as running instead of ready, so that a resumed run generates the lost answer again.
    """
    deadline = time.monotonic() + timeout_s
    groups = {group_id: _fetched(group, deadline) for group_id, group in snapshot["groups"].items()}
    live = []
    for group in map(Group.from_row, snapshot["ledger"]["live"]):
        is_lost = group.state is GroupState.READY and None in groups[group.id]["payloads"]
        if is_lost:
            logger.warning("answers of group %s are lost: a resumed run generates them again", group.id)
        live.append((replace(group, state=GroupState.RUNNING) if is_lost else group).to_row())
    saved = {**snapshot, "format": STATE_FORMAT, "groups": groups, "ledger": {**snapshot["ledger"], "live": live}}
    path = Path(folder) / ROLLOUT_STATE
    path.parent.mkdir(parents=True, exist_ok=True)
    # torch's default pickle protocol would write bytes as text. A prompt may have objects of classes that a user's file
    # defines, and Ray's cloudpickle can write these.
    keeping = {"pickle_module": cloudpickle, "pickle_protocol": pickle.HIGHEST_PROTOCOL}
    durable.write(path, lambda file: torch.save(saved, file, **keeping))


def _fetched(group: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Return ``group``, a live group, with payloads instead of object references, and None for each lost answer."""
    payloads = [None if payload is None else _unless_lost(payload, deadline) for payload in group["payloads"]]
    scored = [None if payload is None else score for payload, score in zip(payloads, group["scored"], strict=True)]
    return {**group, "scored": scored, "payloads": payloads}


def _unless_lost(payload: ray.ObjectRef, deadline: float) -> Any:
    try:
        fetched = ray.get(payload, timeout=max(0.0, deadline - time.monotonic()))
    except ObjectLostError:
        return None
    # torch.save writes a tensor's memory without a copy, but would copy an array.
    return torch.from_numpy(fetched) if isinstance(fetched, np.ndarray) else fetched


def load(folder: str) -> dict[str, Any]:
    """Read the rollout state from the folder of a checkpoint.

    Raises:
        SnapshotError: another version of this package wrote the file, in a format that this version does not read.
        BadFile: the file has no snapshot.
        Exception: any error of unpickling, because the file is damaged.
    """
    snapshot = torch.load(Path(folder) / ROLLOUT_STATE, weights_only=False)
    if not isinstance(snapshot, dict):
        raise BadFile(f"{ROLLOUT_STATE} has a {type(snapshot).__name__} instead of a dict")
    if isinstance(snapshot.get("format"), bool) or snapshot.get("format") != STATE_FORMAT:
        raise SnapshotError(
            f"{folder} has a rollout state of format {snapshot.get('format')!r}, but this version of the package reads "
            f"format {STATE_FORMAT}. Resume with the version that wrote it, or start a new run from its weights "
            "(actor_rollout_ref.model.path, trainer.resume_mode=disable)."
        )
    return snapshot


def put_payloads(snapshot: dict[str, Any]) -> None:
    """Put the payloads of a loaded snapshot into Ray's object store, and replace them by object references."""
    for group in snapshot["groups"].values():
        group["payloads"] = [None if payload is None else ray.put(_array(payload)) for payload in group["payloads"]]


def _array(payload: Any) -> Any:
    """Return a payload in a form that `recipe.async_engine.rollout.trajectory_codec` can unpack.

    That form is an array, or bytes if an earlier version of this package wrote the checkpoint.
    """
    return payload.numpy() if isinstance(payload, torch.Tensor) else payload

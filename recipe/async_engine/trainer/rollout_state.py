# SPDX-License-Identifier: Apache-2.0
"""The rollout side of a checkpoint: ledger, prompt position and live groups.

Contract: one file holds all three as of one moment, is written beside the model before the checkpoint is committed
(``checkpoints``), and appears whole or not at all. A scheduler's snapshot holds references to the payloads, which are
fetched as they are written, on whatever thread, from the object store's memory to the file. After loading it, ready
groups are trained as they are, running ones go on from the answers that are kept, and no other prompt is affected. It
is read back with ``torch.load`` in its pickling form: checkpoints are trusted like the code (verl's own ``data.pt`` is
the same). `Snapshot` says what it holds; what is of another kind is damaged (`checked`).
Shown by tests/integration/test_rollout_state.py, test_damaged_files.py and tests/e2e/test_faults.py.
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
"""As `Group.to_row` gives it."""


class LedgerState(TypedDict):
    """As `SampleLedger.snapshot` gives it."""

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
    """As `PromptSource.state` gives it; earlier versions put one prompt back."""

    epoch: Number
    taken_in_epoch: Number
    put_back: list[InstanceOf[Prompt]] | InstanceOf[Prompt] | None
    dataloader: dict[str, Any] | None


@with_config(ConfigDict(arbitrary_types_allowed=True))
class LiveGroup(TypedDict):
    """A live group: its prompt, and by trajectory what is there of it."""

    row: dict[str, Any]
    scored: list[InstanceOf[TrajectoryScored] | None]
    payloads: list[InstanceOf[torch.Tensor] | InstanceOf[np.ndarray] | bytes | None]
    kept: list[InstanceOf[TrajectoryRecord] | None]


class Interrupted(TypedDict):
    """Tokens of answers that were cut."""

    cut: Number
    lost: Number
    trained: Number


class Scores(TypedDict):
    """Of the first and the last validation."""

    first: float | None
    last: float | None


class Snapshot(TypedDict):
    """The rollout side as it is read back."""

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
    """A run's ledger, as it begins or as of a checkpoint's ``snapshot``."""
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
    """The snapshot itself; raises `BadFile` if it is not what `save` writes."""
    try:
        SNAPSHOTS.validate_python(snapshot, strict=True)
    except ValidationError as error:
        raise BadFile(f"its {ROLLOUT_STATE} is of another kind ({said(error)})") from None
    ready = {row[0]: row[5] == GroupState.READY for row in snapshot["ledger"]["live"]}
    if ready.keys() != snapshot["groups"].keys():
        raise BadFile(f"its {ROLLOUT_STATE} has other groups than its ledger")
    for group_id, group in snapshot["groups"].items():
        payloads = group["payloads"]
        if not len(payloads) == len(group["scored"]) == len(group["kept"]):
            raise BadFile(f"its {ROLLOUT_STATE} has parts of group {group_id} that do not fit each other")
        there = [
            score is not None for score, payload in zip(group["scored"], payloads, strict=True) if payload is not None
        ]
        if not all(there) or (ready[group_id] and len(there) < len(payloads)):
            raise BadFile(f"its {ROLLOUT_STATE} lacks answers of group {group_id}")
        for record in group["kept"]:
            if record is not None:
                pickle.loads(record.answers)
    return dict(snapshot)


def save(folder: str, snapshot: dict[str, Any], timeout_s: float) -> None:
    """Write a scheduler's snapshot into the checkpoint ``folder``, payloads included; they have ``timeout_s`` to come.

    A group of which the object store has lost a payload, with the node or the worker that had it, is saved as one that
    still runs: the lost answer is generated again.
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
    # The protocol is that of what is no tensor; torch's own writes bytes as text. A prompt may have objects of classes
    # that the user's file defines, which Ray's pickle takes along.
    keeping = {"pickle_module": cloudpickle, "pickle_protocol": pickle.HIGHEST_PROTOCOL}
    durable.write(path, lambda file: torch.save(saved, file, **keeping))


def _fetched(group: dict[str, Any], deadline: float) -> dict[str, Any]:
    """A live group as it is kept, with the payloads that are there; None for what an answer that is lost has."""
    payloads = [None if payload is None else _unless_lost(payload, deadline) for payload in group["payloads"]]
    scored = [None if payload is None else score for payload, score in zip(payloads, group["scored"], strict=True)]
    return {**group, "scored": scored, "payloads": payloads}


def _unless_lost(payload: ray.ObjectRef, deadline: float) -> Any:
    try:
        fetched = ray.get(payload, timeout=max(0.0, deadline - time.monotonic()))
    except ObjectLostError:
        return None
    # A tensor's memory goes to the file as it is, an array's is copied first.
    return torch.from_numpy(fetched) if isinstance(fetched, np.ndarray) else fetched


def load(folder: str) -> dict[str, Any]:
    """Read a snapshot back.

    Raises:
        SnapshotError: its format is another one than this version reads.
        Exception: whatever unpickling raises; it is damaged.
    """
    snapshot = torch.load(Path(folder) / ROLLOUT_STATE, weights_only=False)
    if not isinstance(snapshot, dict):
        raise BadFile(f"its {ROLLOUT_STATE} has a {type(snapshot).__name__}")
    if isinstance(snapshot.get("format"), bool) or snapshot.get("format") != STATE_FORMAT:
        raise SnapshotError(
            f"{folder} has a rollout side of format {snapshot.get('format')!r}, this version of the package reads "
            f"{STATE_FORMAT}. Resume with the version that wrote it, or start a new run from its weights "
            "(actor_rollout_ref.model.path, trainer.resume_mode=disable)."
        )
    return snapshot


def put_payloads(snapshot: dict[str, Any]) -> None:
    """Make object references of the payloads of a snapshot that was read back."""
    for group in snapshot["groups"].values():
        group["payloads"] = [None if payload is None else ray.put(_array(payload)) for payload in group["payloads"]]


def _array(payload: Any) -> Any:
    """A payload as `recipe.async_engine.rollout.trajectory_codec` takes it; other versions have saved bytes."""
    return payload.numpy() if isinstance(payload, torch.Tensor) else payload

# SPDX-License-Identifier: Apache-2.0
"""The rollout side of a checkpoint: ledger, prompt position and live groups.

Contract: one file holds all three as of one moment, is written beside the model before the checkpoint is committed
(``checkpoints``), and appears whole or not at all. A scheduler's snapshot holds references to the payloads, which are
fetched as they are written, on whatever thread, from the object store's memory to the file. After loading it, ready
groups are trained as they are, running ones go on from the answers that are kept, and no other prompt is affected. It
is read back with ``torch.load`` in its pickling form: checkpoints are trusted like the code (verl's own ``data.pt`` is
the same).
Shown by tests/integration/test_rollout_state.py and tests/e2e/test_faults.py.
"""

import logging
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle
from ray.exceptions import ObjectLostError

from recipe.async_engine.core.errors import SnapshotError
from recipe.async_engine.core.groups import Group, GroupState
from recipe.async_engine.core.snapshots import STATE_FORMAT
from recipe.async_engine.storage import durable

logger = logging.getLogger(__name__)

ROLLOUT_STATE = "rollout_state.pt"


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
    """Read a snapshot back; raises SnapshotError if its format is another one than this version reads."""
    snapshot = torch.load(Path(folder) / ROLLOUT_STATE, weights_only=False)
    if snapshot.get("format") != STATE_FORMAT:
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

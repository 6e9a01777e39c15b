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
"""The rollout side of a checkpoint: ledger, prompt position and live groups.

Contract: one file holds all three as of one moment, is written beside the model before the checkpoint is committed
(``checkpoints``), and appears whole or not at all. After loading it, ready groups are trained as they are, running ones
go on from the answers that are kept, and no other prompt is affected. It is read back with ``torch.load`` in its
pickling form: checkpoints are trusted like the code (verl's own ``data.pt`` is the same).
Shown by tests/integration/test_rollout_state.py and tests/e2e/test_faults.py.
"""

import os
from pathlib import Path
from typing import Any

import ray
import torch

from recipe.async_engine.trainer.checkpoints import ROLLOUT_STATE, require_ours


def save(folder: str, snapshot: dict[str, Any], timeout_s: float) -> None:
    """Write a scheduler's snapshot into the checkpoint ``folder``, payloads included."""
    groups = {group_id: _fetched(group, timeout_s) for group_id, group in snapshot["groups"].items()}
    path = Path(folder) / ROLLOUT_STATE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({**snapshot, "groups": groups}, partial)
    os.replace(partial, path)


def _fetched(group: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """A live group as it is kept, with the payloads that are there."""
    there = [payload for payload in group["payloads"] if payload is not None]
    fetched = iter(ray.get(there, timeout=timeout_s))
    payloads = [None if payload is None else next(fetched) for payload in group["payloads"]]
    return {**group, "payloads": payloads}


def load(folder: str) -> dict[str, Any]:
    """Read a snapshot back; payloads are object references again.

    Raises:
        CheckpointError: the checkpoint has none, because another trainer wrote it.
    """
    require_ours(folder)
    snapshot = torch.load(Path(folder) / ROLLOUT_STATE, weights_only=False)
    for group in snapshot["groups"].values():
        group["payloads"] = [None if payload is None else ray.put(payload) for payload in group["payloads"]]
    return snapshot

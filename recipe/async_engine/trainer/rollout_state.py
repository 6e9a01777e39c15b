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

Contract: one file holds all three as of one moment, is written beside the model before the checkpoint is announced
(``latest_checkpointed_iteration.txt``), and appears whole or not at all. After loading it, ready groups are trained as
they are, running ones are generated again, and no other prompt is affected. It is read back with ``torch.load`` in its
pickling form: checkpoints are trusted like the code (verl's own ``data.pt`` is the same).
Shown by tests/integration/test_rollout_state.py and tests/e2e/test_resume.py.
"""

import os
from pathlib import Path
from typing import Any

import ray
import torch

from recipe.async_engine.core.errors import RecipeError

FILE_NAME = "rollout_state.pt"


class CheckpointError(RecipeError):
    """A checkpoint cannot be used by this run."""


def save(folder: str, snapshot: dict[str, Any], timeout_s: float) -> None:
    """Write a scheduler's snapshot into the checkpoint ``folder``, payloads included."""
    groups = {}
    for group_id, group in snapshot["groups"].items():
        complete = all(payload is not None for payload in group["payloads"])
        # A running group is generated again, so what it has so far is left out.
        payloads = ray.get(group["payloads"], timeout=timeout_s) if complete else []
        groups[group_id] = {"row": group["row"], "scored": group["scored"] if complete else [], "payloads": payloads}
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({**snapshot, "groups": groups}, partial)
    os.replace(partial, path)


def load(folder: str) -> dict[str, Any]:
    """Read a snapshot back; payloads are object references again.

    Raises:
        CheckpointError: the checkpoint has none, because another trainer wrote it.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {FILE_NAME}: it was not written by this trainer, and its prompts cannot be accounted "
            "for. Start from its model with actor_rollout_ref.model.path and trainer.resume_mode=disable."
        )
    snapshot = torch.load(path, weights_only=False)
    for group in snapshot["groups"].values():
        group["payloads"] = [ray.put(payload) for payload in group["payloads"]]
    return snapshot

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
"""Saves a run and finds it again: verl's checkpoint and the rollout side as one.

Contract: `save` returns when everything is on disk and committed; a process that ends before leaves the checkpoint
before it. `load` gives the rollout side of the checkpoint that verl loads. Shown by
tests/integration/test_crash_fuzz.py (pure core, `kill -9`) and tests/e2e/test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import open_dict

from recipe.async_engine.core.config import RunPlan
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.trainer import checkpoints, rollout_state


class RunState:
    """The checkpoints of one run; see the module's contract."""

    def __init__(self, config: Any, plan: RunPlan) -> None:
        self._config = config
        self._trainer = config.trainer
        self._root = config.trainer.default_local_dir
        self._timeout_s = plan.settings.async_training.timeouts.checkpoint
        self.resumed: dict[str, Any] = {"step": 0, "groups_kept": 0, "changed": []}
        """Of a resumed run: the checkpoint's step, and how many of its groups were complete and not yet trained."""

    def save(self, step: int, snapshot: dict[str, Any], save_verl: Callable[[], None]) -> None:
        """Commit ``snapshot`` and what ``save_verl`` writes together; then what they make superfluous goes."""
        folder = checkpoints.folder_of(self._root, step)
        checkpoints.begin(folder)
        rollout_state.save(str(folder), snapshot, self._timeout_s)
        limits = {name: self._trainer.get(name) for name in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")}
        # verl would remove an old checkpoint before this one is committed.
        with open_dict(self._config):
            self._trainer.update(dict.fromkeys(limits))
            save_verl()
            self._trainer.update(limits)
        checkpoints.commit(folder, step)
        # A checkpoint is kept or removed as a whole.
        checkpoints.retain(self._root, step, limits["max_actor_ckpt_to_keep"])

    def find(self) -> str | None:
        """The complete checkpoint that verl will load when it is asked to; None where it starts from the beginning.

        Raises:
            CheckpointError: the checkpoint to resume from is not complete, or another trainer's.
        """
        if self._trainer.resume_mode == "disable":
            return None
        if self._trainer.resume_mode == "resume_path":
            checkpoints.require_committed(self._trainer.resume_from_path)
            return self._trainer.resume_from_path
        step = checkpoints.settle(self._root)
        return None if step is None else str(checkpoints.folder_of(self._root, step))

    def load(self, folder: str | None, prompts: PromptSource) -> dict[str, Any] | None:
        """The rollout side to go on from, ``prompts`` put in its place; None at the beginning of a run."""
        if folder is None:
            return None
        snapshot = rollout_state.load(folder)
        prompts.restore(snapshot["source"])
        self.resumed["step"] = int(folder.rpartition("global_step_")[2])
        return snapshot

# SPDX-License-Identifier: Apache-2.0
"""Saves a run and finds it again: verl's checkpoint and the rollout side as one.

Contract: `save` returns when everything is on disk and committed; a process that ends before leaves the checkpoint
before it. `find` chooses the newest complete one whose rollout side can be read, and refuses settings that cannot go on
from it; `load` gives that rollout side. Shown by tests/integration/test_checkpoint_faults.py (every write fails or is
the last one), test_crash_fuzz.py (`kill -9`) and tests/e2e/test_faults.py.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import open_dict

from recipe.async_engine.core.config import RunPlan
from recipe.async_engine.core.errors import SnapshotError
from recipe.async_engine.core.snapshots import changes
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.run.owner import CHECKPOINTS, Owner
from recipe.async_engine.trainer import checkpoints, rollout_state
from recipe.async_engine.trainer.checkpoints import CheckpointError

logger = logging.getLogger(__name__)

FULL = 1 << 20
"""A disk with fewer free bytes is why a checkpoint could not be saved."""
ENDING_S = 60.0
"""How long the trainer of an earlier start may take to end after its main was killed."""


class RunState:
    """The checkpoints of one run; see the module's contract.

    Args:
        config: the whole configuration; verl's own retention is switched off in it while verl saves.
        made_with: what decides whether a later run can go on from them (`trainer.made_with`).
    """

    def __init__(self, config: Any, plan: RunPlan, made_with: Mapping[str, Any]) -> None:
        self._config = config
        self._trainer = config.trainer
        self._root = config.trainer.default_local_dir
        self._timeout_s = plan.settings.async_training.timeouts.checkpoint
        self._made_with = dict(made_with)
        self._owner: Owner | None = None
        self._found: dict[str, Any] | None = None
        self._history_from: int | None = -1
        """Checkpoints in the folder past this step are of another history; None once they were set aside."""
        self.resumed: dict[str, Any] = {"step": 0, "groups_kept": 0, "changed": []}
        """Of a resumed run: the checkpoint's step, how many of its groups were complete and not yet trained, and which
        settings have changed."""

    def save(self, step: int, snapshot: dict[str, Any], save_verl: Callable[[], None]) -> None:
        """Commit ``snapshot`` and what ``save_verl`` writes together; then what they make superfluous goes.

        A step that has a checkpoint keeps the one that it has.
        """
        root = self._root
        if self._history_from is not None:
            checkpoints.set_aside(root, self._history_from)
            self._history_from = None
        folder = checkpoints.folder_of(root, step)
        if (folder / checkpoints.MARKER).exists():
            return
        tracked = checkpoints.tracked(root)
        try:
            rollout_state.save(str(folder), {**snapshot, "made_with": self._made_with}, self._timeout_s)
            kept = self._without_retention(save_verl)
            checkpoints.commit(root, step)
        except Exception as error:
            full = shutil.disk_usage(root).free < FULL
            checkpoints.abandon(root, step, tracked)
            if full:  # torch says no more than that a file has a wrong size
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
            raise
        # A checkpoint is kept or removed as a whole.
        checkpoints.retain(root, step, kept)

    def _without_retention(self, save_verl: Callable[[], None]) -> int | None:
        """Save; verl would remove an old checkpoint before this one is committed. Returns how many are to be kept."""
        names = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "remove_previous_ckpt_in_save")
        limits = {name: self._trainer.get(name) for name in names}
        with open_dict(self._config):
            self._trainer.update({**dict.fromkeys(names), "remove_previous_ckpt_in_save": False})
            try:
                save_verl()
            finally:
                self._trainer.update(limits)
        return 1 if limits["remove_previous_ckpt_in_save"] else limits["max_actor_ckpt_to_keep"]

    def find(self) -> str | None:
        """The complete checkpoint that verl will load when it is asked to; None where it starts from the beginning.

        Raises:
            CheckpointError: there is none that can be used, or it is another trainer's.
            SnapshotError: the run cannot go on from it with its settings.
            FolderTaken: an earlier start still writes there.
        """
        Path(self._root).mkdir(parents=True, exist_ok=True)
        self._owner = Owner(self._root, CHECKPOINTS, ENDING_S)
        checkpoints.clear(self._root)
        mode = self._trainer.resume_mode
        folder = None if mode == "disable" else self._named() if mode == "resume_path" else self._newest()
        if folder is not None:
            self.resumed["step"] = step = int(str(folder).rpartition("global_step_")[2])
            if folder.resolve() == checkpoints.folder_of(self._root, step).resolve():
                self._history_from = step
            self._compare(folder)
        if self._trainer.save_freq > 0:
            checkpoints.require_room(self._root, -1 if self._history_from is None else self._history_from)
        return None if folder is None else str(folder)

    def _named(self) -> Path:
        """The one that ``trainer.resume_from_path`` names, and no other."""
        folder = Path(self._trainer.resume_from_path)
        checkpoints.require_ours(folder)
        why = checkpoints.problem(folder) or self._read(folder)
        if why is not None:
            raise CheckpointError(
                f"trainer.resume_from_path={folder} cannot be used: {why}. Name another one, or set "
                "trainer.resume_mode=auto to resume from the newest complete one."
            )
        if checkpoints.tracked(self._root) is None:
            # verl reads it in any case, and one that was cut off ends that.
            checkpoints.track(self._root, None)
        return folder

    def _newest(self) -> Path | None:
        refused = []
        for step in checkpoints.candidates(self._root):
            folder = checkpoints.folder_of(self._root, step)
            why = checkpoints.problem(folder) or self._read(folder)
            if why is None:
                checkpoints.track(self._root, step)
                return folder
            logger.warning("%s cannot be used, an older one is looked for: %s", folder, why)
            refused.append(f"{folder.name}: {why}")
        if refused:
            raise CheckpointError(
                f"no checkpoint in {self._root} can be used ({'; '.join(refused)}). Repair one, or set "
                "trainer.resume_mode=disable to start from the beginning; they are kept under other names then."
            )
        if (Path(self._root) / checkpoints.TRACKER).exists():
            logger.warning("no checkpoint in %s is complete: the run starts from the beginning", self._root)
        checkpoints.track(self._root, None)
        return None

    def _read(self, folder: Path) -> str | None:
        """Read the rollout side; returns why it could not be read."""
        try:
            self._found = rollout_state.load(str(folder))
        except SnapshotError:
            raise
        except Exception as error:  # unpickling raises anything
            return f"its {checkpoints.ROLLOUT_STATE} cannot be read ({type(error).__name__}: {error})"
        return None

    def _compare(self, folder: Path) -> None:
        assert self._found is not None
        live = len(self._found["ledger"]["live"])
        try:
            changed = changes(self._found["made_with"], self._made_with, live)
        except SnapshotError as error:
            raise SnapshotError(f"cannot resume from {folder}: {error}") from None
        self.resumed["changed"] = changed
        if changed:
            logger.warning("since the checkpoint that is resumed from, these have changed: %s", "; ".join(changed))

    def load(self, prompts: PromptSource) -> dict[str, Any] | None:
        """The rollout side that was found, ``prompts`` put in its place; None at the beginning of a run."""
        snapshot, self._found = self._found, None
        if snapshot is not None:
            rollout_state.put_payloads(snapshot)
            prompts.restore(snapshot["source"])
        return snapshot

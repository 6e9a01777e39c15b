# SPDX-License-Identifier: Apache-2.0
"""The stage that saves a run, and begins one from what was saved.

Contract: a checkpoint is of one moment, between two steps. The scheduler's side of it is frozen as references, verl's
is written on the trainer's thread, and then training goes on: a thread beside it fetches and writes the rest and
commits. One is under way at a time: the next one, and the end of the run, wait for it. It has
``async_training.timeouts.checkpoint`` seconds, and one that fails or is late ends the run with its own error, at the
latest when the next step begins. A run that fails meanwhile completes it first, if it can. Shown by
tests/integration/test_save_stage.py, tests/e2e/test_faults.py and test_disks.py.
"""

from __future__ import annotations

import logging
from typing import Any

from verl.utils.debug import marked_timer

from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.timeline import Timeline
from recipe.async_engine.core.unchanged import UnchangedWeights
from recipe.async_engine.recovery.watch import RunWatch
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.rollout.scheduler import RolloutScheduler
from recipe.async_engine.trainer.beside import Beside
from recipe.async_engine.trainer.checkpoints import CheckpointTimeout, RunState, folder_of
from recipe.async_engine.trainer.staged import StagedTrainer

logger = logging.getLogger(__name__)


def new_saving(limit_s: float) -> Beside[None]:
    """What writes checkpoints beside training, each within ``limit_s`` seconds."""

    def late(step: int) -> CheckpointTimeout:
        return CheckpointTimeout(
            f"the checkpoint of step {step} was not written within {limit_s:g} s "
            "(async_training.timeouts.checkpoint); raise it if the disk of trainer.default_local_dir is slow"
        )

    return Beside("checkpoint", limit_s, late)


class SaveStage(StagedTrainer):
    """See the module's contract."""

    saved: RunState
    saving: Beside[None]
    timeline: Timeline
    unchanged: UnchangedWeights
    prompts: PromptSource
    validation: dict[str, float | None]
    _interrupted_tokens: TokenAccount
    _saved_at: int
    _watch: RunWatch | None

    @property
    def running(self) -> RolloutScheduler:
        """The scheduler."""
        raise NotImplementedError

    @property
    def _is_within_version(self) -> bool:
        """Whether batches have been trained since the last publication."""
        return self.ledger.batches_left < self.plan.batches_per_version

    def _new_ledger(self, snapshot: dict[str, Any] | None = None) -> SampleLedger:
        raise NotImplementedError

    def _finish_publication(self) -> None:
        raise NotImplementedError

    def _is_due(self, every: int, version: int) -> bool:
        return every > 0 and (self.is_last_step or version % every == 0)

    def _save_if_due(self) -> None:
        if self._is_due(self.config.trainer.save_freq, self.ledger.version):
            self._save_once()

    def _save_once(self) -> None:
        """Have verl's part of a checkpoint written; what writes the rest goes on beside training."""
        if self._saved_at != self.global_steps:
            self._saved_at = self.global_steps
            # A run that resumes begins with a version that generates.
            self._finish_publication()
            self._finish_saving()
            with self.timeline.phase("save"), marked_timer("save_checkpoint", self.timing_raw):
                self._save_checkpoint()

    def _finish_saving(self) -> None:
        """Wait until the checkpoint that was begun last is complete."""
        assert self._watch is not None
        limit_s = self.timeouts.checkpoint
        with self.timeline.phase("save"), self._watch.within("checkpoint", limit_s, "writing a checkpoint"):
            self.saving.wait()

    def _complete_saving(self) -> None:
        """The run fails: the checkpoint under way is completed all the same, if it can be."""
        try:
            self._finish_saving()
        except Exception:  # the run's own error is the one to report
            logger.exception("the last checkpoint is not complete")

    def _save_checkpoint(self) -> None:
        """verl's checkpoint, and the rollout side of this moment, which is written and committed beside training."""
        snapshot = {**self.running.snapshot(self.timeouts.checkpoint), "validation": dict(self.validation)}
        snapshot["unchanged_versions"] = self.unchanged.total
        snapshot["skipped_updates"] = {model: skipped.total for model, skipped in self.skipped_updates.items()}
        assert self._watch is not None
        with self._watch.within("checkpoint", self.timeouts.checkpoint, "writing a checkpoint"):
            write_rest = self.saved.save(self.global_steps, snapshot, self._save_training_side)
        self.saving.begin(self.global_steps, write_rest)

    def _save_training_side(self) -> None:
        super()._save_checkpoint()
        if self._is_within_version:
            self.published.save(folder_of(self.config.trainer.default_local_dir, self.global_steps))

    def _resume(self) -> dict[int, dict[str, Any]]:
        """Load the newest complete checkpoint, if any; returns its live groups."""
        self.global_steps = 0
        folder = self.saved.find()
        self._load_checkpoint()
        snapshot = self.saved.load(self.prompts)
        if snapshot is None or folder is None:
            return {}
        self._saved_at = self.global_steps
        self.ledger = self._new_ledger(snapshot["ledger"])
        self.saved.resumed["groups_kept"] = self.ledger.counts().ready
        if self._is_within_version:
            self.published.load(folder)
        self.validation = snapshot.get("validation", self.validation)
        counts = snapshot["interrupted_tokens"]
        self._interrupted_tokens = TokenAccount(counts["cut"], counts["lost"], trained=counts["trained"])
        for model, total in snapshot.get("skipped_updates", {}).items():
            self.skipped_updates[model].total = total
        self.unchanged.total = snapshot.get("unchanged_versions", 0)
        return snapshot["groups"]

# SPDX-License-Identifier: Apache-2.0
"""Saves a run while training continues, and resumes a run from a checkpoint.

Contract: a checkpoint is the state of a run between two steps. The trainer's thread copies the scheduler's state, with
object references instead of trajectories, and has verl write its files. Then training continues, while another thread
fetches the trajectories, writes the remaining files and commits the checkpoint. Only one checkpoint is written at a
time: the next checkpoint, and the end of the run, wait for it. If a checkpoint fails or takes more than
``async_training.timeouts.checkpoint`` seconds, the run ends with that error, at the latest when the next step begins.
If the run fails for another reason, an unfinished checkpoint is completed first, if possible. Shown by
tests/integration/test_save_stage.py, tests/e2e/test_faults.py and test_disks.py.

verl's v1 trainers call the callback ``trainer.checkpoint_callback_class`` after each checkpoint. This package calls the
callback on the trainer's thread when a checkpoint is complete. As in verl, an error of the callback ends the run. The
time of a checkpoint includes the callback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi
from verl.utils.debug import marked_timer

from recipe.async_engine.actors.watch import RunWatch
from recipe.async_engine.core.errors import CheckpointError
from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.trainer.alarm_stage import new_alarms
from recipe.async_engine.trainer.beside import Beside
from recipe.async_engine.trainer.checkpoints import RunState, folder_of
from recipe.async_engine.trainer.publish_stage import PublishStage
from recipe.async_engine.trainer.rollout_state import new_ledger
from recipe.async_engine.trainer.step import TrainingStep

logger = logging.getLogger(__name__)


def teller(config: Any, trainer: Any) -> Callable[[int], None]:
    """Return a function that takes a checkpoint's step and calls the user's checkpoint callback, if there is one."""
    callback = build_checkpoint_callback(config)

    def tell(step: int) -> None:
        folder = str(folder_of(config.trainer.default_local_dir, step))
        callback.on_save(trainer=trainer, global_step=step, checkpoint_dir=folder, async_save=False)

    return tell


def instance_expires(config: Any, longest_step_s: float) -> bool:
    """Return whether this cloud instance ends so soon that the run must be saved (``trainer.esi_redundant_time``)."""
    try:
        return should_save_ckpt_esi(longest_step_s, redundant_time=config.trainer.esi_redundant_time)
    except (ValueError, OverflowError, OSError) as error:
        logger.warning("when this instance expires cannot be read from its environment: %s", error)
        return False


class SaveStage:
    """Writes checkpoints on a thread of its own. Only the trainer's thread calls the methods.

    Args:
        limit_s: seconds that a checkpoint may take in total.
        watched: takes a text that names what is waited for, and returns a context that enforces the deadline of the
            wait.
        committed: called with the step of each checkpoint when it is complete.

    Attributes:
        step: the step of the newest checkpoint that this run wrote or resumed from, or -1 if there is none.
    """

    def __init__(
        self,
        saved: RunState,
        timeline: Timeline,
        limit_s: float,
        watched: Callable[[str], AbstractContextManager[None]],
        committed: Callable[[int], None],
    ) -> None:
        def late(step: int) -> CheckpointError:
            return CheckpointError(
                f"the checkpoint of step {step} was not written within {limit_s:g} s "
                "(async_training.timeouts.checkpoint); raise it if the disk of trainer.default_local_dir is slow"
            )

        self._saved, self._timeline, self._watched, self._committed = saved, timeline, watched, committed
        self._writing: Beside[int] = Beside("checkpoint", limit_s, late)
        self.step = -1

    @property
    def is_over(self) -> bool:
        """Whether a checkpoint's writing has ended or has exceeded ``limit_s``, so that `finish` does not block."""
        return self._writing.is_over

    def save(self, step: int, snapshot: dict[str, Any], save_training_side: Callable[[], None]) -> None:
        """Have ``save_training_side`` write verl's files now, and write ``snapshot`` while training continues.

        ``snapshot`` is the state of the rollout, with object references instead of trajectories.
        """
        with self._watched("writing a checkpoint"):
            write_rest = self._saved.save(step, snapshot, save_training_side)
        self.step = step

        def write() -> int:
            write_rest()
            return step

        self._writing.begin(step, write)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete."""
        with self._timeline.phase("save"), self._watched("writing a checkpoint"):
            step = self._writing.wait()
            if step is not None:
                self._committed(step)

    def complete(self) -> None:
        """Complete the checkpoint that is being written, if possible, before the run ends with an error."""
        try:
            self.finish()
        except Exception:  # the run's own error is reported instead
            logger.exception("the last checkpoint is not complete")


@contextmanager
def loading(folder: str | Path | None) -> Iterator[None]:
    """Raise errors of verl's workers as `CheckpointError` inside the ``with`` block, which loads ``folder``."""
    try:
        yield
    except RayError as error:
        if folder is None:
            raise
        raise CheckpointError(
            f"verl cannot load {folder}, which is damaged, or of another model or LoRA adapter: {error}\nName another "
            "checkpoint (trainer.resume_mode=resume_path trainer.resume_from_path=...), or use the settings of its run."
        ) from error


class SavedRun(TrainingStep):
    """The part of a trainer that saves the run when a checkpoint is due, and resumes the run from a checkpoint."""

    saved: RunState
    saving: SaveStage
    publishing: PublishStage
    prompts: PromptSource
    validation: dict[str, float | None]
    interrupted_tokens: TokenAccount
    watch: RunWatch | None = None
    global_steps: int
    max_steps_duration: float
    is_last_step: bool

    def _watched(self, what: str) -> AbstractContextManager[None]:
        """Return a context that ends the run if reading or writing a checkpoint takes too long."""
        assert self.watch is not None
        return self.watch.within("checkpoint", self.timeouts.checkpoint, what)

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.is_last_step or self.ledger.version % every == 0)

    @property
    def is_within_version(self) -> bool:
        """Whether batches have been trained since the last publication of weights."""
        return self.ledger.batches_left < self.plan.batches_per_version

    def save_if_due(self) -> None:
        """Write a checkpoint of the run if one is due, after this version or because the run ends."""
        if self._is_due(self.config.trainer.save_freq):
            self.save_once()

    def _save_if_instance_expires(self) -> None:
        if self.config.trainer.save_freq > 0 and instance_expires(self.config, self.max_steps_duration):
            self.save_once()
            self.saving.finish()

    def save_once(self) -> None:
        """Write a checkpoint of the run, unless there already is one of this step."""
        if self.saving.step != self.global_steps:
            # First finish the publication: a checkpoint must not contain a version that the replicas do not have yet.
            self.publishing.finish(self.metrics)
            self.saving.finish()
            with self.timeline.phase("save"), marked_timer("save_checkpoint", self.timing_raw):
                self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        snapshot = {**self.running.snapshot(self.timeouts.checkpoint), "validation": dict(self.validation)}
        snapshot["alarms"] = self.alarms.counts
        self.saving.save(self.global_steps, snapshot, self._save_training_side)

    def _save_training_side(self) -> None:
        self.stages.save(self.global_steps)
        if self.is_within_version:
            self.published.save(folder_of(self.config.trainer.default_local_dir, self.global_steps))

    def _load(self) -> dict[int, dict[str, Any]]:
        """Load the checkpoint to resume from, if there is one, and return the checkpoint's untrained groups by id."""
        folder = self.saved.find()
        with loading(folder):
            self.global_steps = self.stages.load()
        snapshot = self.saved.load(self.prompts)
        if snapshot is None or folder is None:
            self._start_from()
            return {}
        self.saving.step = self.global_steps
        self.ledger = new_ledger(self.plan, snapshot["ledger"])
        self.saved.resumed["groups_kept"] = self.ledger.counts().ready
        if self.is_within_version:
            self.published.load(folder)
        self.validation = snapshot.get("validation", self.validation)
        counts = snapshot["interrupted_tokens"]
        self.interrupted_tokens = TokenAccount(counts["cut"], counts["lost"], trained=counts["trained"])
        self.alarms = new_alarms(self.plan, snapshot.get("alarms"))
        return snapshot["groups"]

    def _start_from(self) -> None:
        named = self.plan.settings.async_training.start_from
        if named is None:
            return
        folder = Path(named).expanduser().absolute()
        with loading(folder):
            self.stages.load_weights(str(folder))
        logger.warning(
            "the run begins with the weights of %s; its optimizer, learning-rate schedule, position in the data and "
            "number of steps are not carried",
            folder,
        )

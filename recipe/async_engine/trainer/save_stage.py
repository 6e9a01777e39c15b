# SPDX-License-Identifier: Apache-2.0
"""The stage that saves a run beside training.

Contract: a checkpoint is of one moment, between two steps. The scheduler's side of it is frozen as references, verl's
is written on the trainer's thread, and then training goes on: a thread beside it fetches and writes the rest and
commits. One is under way at a time: the next one, and the end of the run, wait for it. It has
``async_training.timeouts.checkpoint`` seconds, and one that fails or is late ends the run with its own error, at the
latest when the next step begins. A run that fails meanwhile completes it first, if it can. Shown by
tests/integration/test_save_stage.py, tests/e2e/test_faults.py and test_disks.py.

verl's v1 trainers call ``trainer.checkpoint_callback_class`` after each checkpoint; here it is called, on the trainer's
thread, when one is complete, and what it raises ends the run, as there. It has to be done within that time too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi

from recipe.async_engine.record.timeline import Timeline
from recipe.async_engine.trainer.beside import Beside
from recipe.async_engine.trainer.checkpoints import CheckpointTimeout, RunState, folder_of

logger = logging.getLogger(__name__)


def teller(config: Any, trainer: Any) -> Callable[[int], None]:
    """Tells the user's checkpoint callback, if there is one, of the checkpoint of a step."""
    callback = build_checkpoint_callback(config)

    def tell(step: int) -> None:
        folder = str(folder_of(config.trainer.default_local_dir, step))
        callback.on_save(trainer=trainer, global_step=step, checkpoint_dir=folder, async_save=False)

    return tell


def instance_expires(config: Any, longest_step_s: float) -> bool:
    """Whether this machine's time is so nearly over that verl would save now (``trainer.esi_redundant_time``)."""
    try:
        return should_save_ckpt_esi(longest_step_s, redundant_time=config.trainer.esi_redundant_time)
    except (ValueError, OverflowError, OSError) as error:
        logger.warning("when this instance expires cannot be read from its environment: %s", error)
        return False


class SaveStage:
    """See the module's contract; the trainer's thread calls it.

    Args:
        saved: writes checkpoints.
        timeline: the trainer's.
        limit_s: seconds that a checkpoint may take in all.
        watched: what keeps the deadline of a wait, whose name it is given.
        committed: told the step of each checkpoint that is complete.

    Attributes:
        step: of the checkpoint that was begun last, or resumed from; -1: none.
    """

    def __init__(
        self,
        saved: RunState,
        timeline: Timeline,
        limit_s: float,
        watched: Callable[[str], AbstractContextManager[None]],
        committed: Callable[[int], None],
    ) -> None:
        def late(step: int) -> CheckpointTimeout:
            return CheckpointTimeout(
                f"the checkpoint of step {step} was not written within {limit_s:g} s "
                "(async_training.timeouts.checkpoint); raise it if the disk of trainer.default_local_dir is slow"
            )

        self._saved, self._timeline, self._watched, self._committed = saved, timeline, watched, committed
        self._writing: Beside[int] = Beside("checkpoint", limit_s, late)
        self.step = -1

    @property
    def is_over(self) -> bool:
        """Whether `finish` has something to wait for, and will not wait."""
        return self._writing.is_over

    def save(self, step: int, snapshot: dict[str, Any], save_training_side: Callable[[], None]) -> None:
        """Have verl's part written by ``save_training_side``; what writes the rest goes on beside training.

        ``snapshot``: the rest of this moment, payloads as object references.
        """
        with self._watched("writing a checkpoint"):
            write_rest = self._saved.save(step, snapshot, save_training_side)
        self.step = step

        def write() -> int:
            write_rest()
            return step

        self._writing.begin(step, write)

    def finish(self) -> None:
        """Wait until the checkpoint that was begun last is complete."""
        with self._timeline.phase("save"), self._watched("writing a checkpoint"):
            step = self._writing.wait()
            if step is not None:
                self._committed(step)

    def complete(self) -> None:
        """The run fails: the checkpoint under way is completed all the same, if it can be."""
        try:
            self.finish()
        except Exception:  # the run's own error is the one to report
            logger.exception("the last checkpoint is not complete")

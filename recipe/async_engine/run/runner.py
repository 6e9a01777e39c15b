# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that builds a run's trainer and runs it.

Contract: ``run`` yields ``Began``; then, for every step, a pair of the trainer's report on the run so far and the
step's metrics; and at last, even if the run failed, ``Ended`` with the trainer's last report. An error is sent as text,
because the main process may not be able to import the error's class. A `RunWatch` watches the run from start-up to its
end.
"""

import gc
import logging
import os
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from recipe.async_engine.actors.watch import RunWatch
from recipe.async_engine.config.legacy import migrated
from recipe.async_engine.config.sections import Timeouts
from recipe.async_engine.core.deadlines import LEAVING_S
from recipe.async_engine.core.plain import origin
from recipe.async_engine.record.events import Class
from recipe.async_engine.record.figures import TRAINER_DOES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Began:
    """The event at the end of start-up: all processes run, and the checkpoint of ``step`` is loaded.

    Without a checkpoint, ``step`` is 0.
    """

    step: int
    state: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """The event at the end of a run.

    ``error`` has name, message and traceback of the error that ended the run; None if there was none.
    """

    state: dict[str, Any]
    error: dict[str, str] | None


class TaskRunner:
    """Builds a mode's trainer and runs it. While `run` is in progress, other threads call `stop`, `beat` and `live`."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._watch: RunWatch | None = None
        self._stopped_by: str | None = None

    def stop(self, why: str) -> None:
        """Ask the trainer to end the run after the present step (`AsyncPPOTrainer.request_stop`)."""
        self._stopped_by = why
        if self._trainer is not None:
            self._trainer.request_stop(why)

    def beat(self) -> dict[str, str] | None:
        """Answer a heartbeat. Return name and message of the error with which the `RunWatch` ends the run, or None."""
        return None if self._watch is None else self._watch.last_words()

    def live(self) -> dict[str, Any]:
        """Return what the trainer and the rollout do now, and the figures of `recipe.async_engine.record.figures`."""
        return {TRAINER_DOES: Class.START_UP} if self._trainer is None else self._trainer.live()

    def run(self, config: dict[str, Any], trainer_class: str, timeouts: Timeouts) -> Iterator[Any]:
        """Run the trainer class named ``trainer_class``; yield `Began`, (report, metrics) of each step, `Ended`."""
        # Import the trainer only here: the main process also imports this module, but does not need the trainer.
        from recipe.async_engine.trainer.diagnosis import describe

        trainer: Any = None
        error: dict[str, str] | None = None
        watch = self._watch = RunWatch(timeouts.stall, config["trainer"]["default_local_dir"])
        watch.start()
        try:
            with watch.within("startup", timeouts.startup, "making the data sets (data.train_files, data.custom_cls)"):
                trainer = self._trainer = self._build(config, trainer_class)
            with watch.within("startup", timeouts.startup, "starting the trainer and its workers"):
                thread = threading.get_ident()
                watch.follow(
                    lambda: trainer.timeline.silent_s,
                    lambda: describe(trainer, thread),
                    trainer.fail,
                    lambda error: trainer.end_tracking(error, LEAVING_S),
                )
                if self._stopped_by is not None:
                    trainer.request_stop(self._stopped_by)
                trainer.init_workers()
            # A full garbage collection halts all threads. The objects of imported modules alone make it take half a
            # second, so exclude them from later collections.
            gc.collect()
            gc.freeze()
            watch.hold(trainer.irreplaceable_actors())
            steps = trainer.fit(watch)
            next(steps)
            yield Began(trainer.global_steps, trainer.account())
            for metrics in steps:
                yield trainer.account(), metrics
        except (Exception, SystemExit) as raised:  # any error is reported as the end of the run
            failure = watch.cause_of(raised) if isinstance(raised, Exception) else raised
            came_from = origin(failure) if trainer is None else ""
            error = {
                "name": type(failure).__name__,
                "message": f"{failure} (caused by {came_from})" if came_from else str(failure),
                "traceback": "".join(traceback.format_exception(failure)),
            }
        if trainer is not None:
            trainer.end_recording(failed=error is not None)
            trainer.end_tracking(error)
        ended = Ended({} if trainer is None else trainer.account(), error)
        watch.stop()
        yield ended
        if trainer is not None:
            trainer.close()

    @staticmethod
    def _build(config: dict[str, Any], trainer_class: str) -> Any:
        from verl.utils.import_utils import load_class_from_fqn

        from recipe.async_engine.features import check_loaded
        from recipe.async_engine.shadowing import check_not_shadowed

        check_loaded()
        check_not_shadowed()
        from recipe.async_engine.inspection.check import check_types
        from recipe.async_engine.trainer.data_sets import tokenizer_and_processor

        conf = OmegaConf.create(migrated(config))
        # On a CPU the main process does not import verl, so it has not checked the settings against verl's types.
        check_types(OmegaConf.to_container(conf, resolve=True))
        os.environ.setdefault("TENSORBOARD_DIR", os.path.join(conf.trainer.default_local_dir, "tensorboard"))
        return load_class_from_fqn(trainer_class, "trainer")(conf, *tokenizer_and_processor(conf))

# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that a run's trainer lives in.

Contract: ``run`` yields ``Began``, then (account of the run, metrics) for every step, then ``Ended`` with the trainer's
account of the run, also when the run failed: the error travels in it as text, because its class may not exist where it
is read. A `RunWatch` is there from the first moment to the last.
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

from recipe.async_engine.actors.watch import LEAVING_S, RunWatch
from recipe.async_engine.config.legacy import migrated
from recipe.async_engine.config.sections import Timeouts
from recipe.async_engine.core.plain import origin
from recipe.async_engine.record.events import Class
from recipe.async_engine.record.figures import TRAINER_DOES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Began:
    """The processes are up, and a checkpoint, if any, is loaded: ``step`` is the last one that it has."""

    step: int
    state: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """The run is over. ``error``: name, message and traceback, or None."""

    state: dict[str, Any]
    error: dict[str, str] | None


class TaskRunner:
    """Builds a mode's trainer and drives it; `stop`, `beat` and `live` are called on threads of their own meanwhile."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._watch: RunWatch | None = None
        self._stopped_by: str | None = None

    def stop(self, why: str) -> None:
        """Have the run end soon, by its own decision; see `AsyncPPOTrainer.request_stop`."""
        self._stopped_by = why
        if self._trainer is not None:
            self._trainer.request_stop(why)

    def beat(self) -> dict[str, str] | None:
        """A sign of life of this process: name and message of the error by which its watch ends the run, if it does."""
        return None if self._watch is None else self._watch.last_words()

    def live(self) -> dict[str, Any]:
        """What each side does now and its figures (`recipe.async_engine.record.figures`)."""
        return {TRAINER_DOES: Class.START_UP} if self._trainer is None else self._trainer.live()

    def run(self, config: dict[str, Any], trainer_class: str, timeouts: Timeouts) -> Iterator[Any]:
        """See the module's contract. ``trainer_class``: fully qualified name of an ``AsyncPPOTrainer``."""
        # The main, which imports this module, can do without the trainer's imports.
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
            # Every thread waits in a full collection of garbage: half a second for what the imports have left alone.
            gc.collect()
            gc.freeze()
            watch.hold(trainer.irreplaceable_actors())
            steps = trainer.fit(watch)
            next(steps)
            yield Began(trainer.global_steps, trainer.account())
            for metrics in steps:
                yield trainer.account(), metrics
        except (Exception, SystemExit) as raised:  # reported as the run's end, whatever it is
            failure = watch.blamed(raised) if isinstance(raised, Exception) else raised
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
        # A main on a CPU does without verl, so it has not asked verl's types.
        check_types(OmegaConf.to_container(conf, resolve=True))
        os.environ.setdefault("TENSORBOARD_DIR", os.path.join(conf.trainer.default_local_dir, "tensorboard"))
        return load_class_from_fqn(trainer_class, "trainer")(conf, *tokenizer_and_processor(conf))

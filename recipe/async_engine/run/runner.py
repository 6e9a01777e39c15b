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
"""The Ray actor that a run's trainer lives in.

Contract: ``run`` yields ``Began``, then (account of the run, metrics) for every step, then ``Ended`` with the trainer's
account of the run, also when the run failed: the error travels in it as text, because its class may not exist where it
is read.
"""

import logging
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

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
    """Builds a mode's trainer and drives it. `stop` is called while `run` goes on, on a thread of its own."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._stopped_by: str | None = None

    def stop(self, why: str) -> None:
        """Have the run end soon, by its own decision; see `AsyncPPOTrainer.request_stop`."""
        self._stopped_by = why
        if self._trainer is not None:
            self._trainer.request_stop(why)

    def run(self, config: dict[str, Any], trainer_class: str) -> Iterator[Any]:
        """See the module's contract.

        Args:
            config: the whole configuration, resolved and plain.
            trainer_class: fully qualified name of an ``AsyncPPOTrainer``.
        """
        trainer: Any = None
        error: dict[str, str] | None = None
        try:
            trainer = self._trainer = self._build(config, trainer_class)
            if self._stopped_by is not None:
                trainer.request_stop(self._stopped_by)
            trainer.init_workers()
            steps = trainer.fit()
            next(steps)
            yield Began(trainer.global_steps, trainer.account())
            for metrics in steps:
                yield trainer.account(), metrics
        except Exception as failure:  # reported as the run's end, whatever it is
            error = {
                "name": type(failure).__name__,
                "message": str(failure),
                "traceback": "".join(traceback.format_exception(failure)),
            }
        yield Ended({} if trainer is None else trainer.account(), error)
        if trainer is not None:
            trainer.close()

    @staticmethod
    def _build(config: dict[str, Any], trainer_class: str) -> Any:
        from verl.utils import hf_processor, hf_tokenizer
        from verl.utils.fs import copy_to_local
        from verl.utils.import_utils import load_class_from_fqn

        from recipe.async_engine.features import check_loaded
        from recipe.async_engine.shadowing import check_not_shadowed

        check_loaded()
        check_not_shadowed()
        from verl.experimental.reward_loop import migrate_legacy_reward_impl

        conf = migrate_legacy_reward_impl(OmegaConf.create(config))
        os.environ.setdefault("TENSORBOARD_DIR", os.path.join(conf.trainer.default_local_dir, "tensorboard"))
        model = conf.actor_rollout_ref.model
        local_path = copy_to_local(model.path, use_shm=model.get("use_shm", False))
        trust = conf.data.get("trust_remote_code", False)
        tokenizer = hf_tokenizer(local_path, trust_remote_code=trust)
        processor = hf_processor(local_path, trust_remote_code=trust, use_fast=True)
        return load_class_from_fqn(trainer_class, "trainer")(conf, tokenizer, processor)

# SPDX-License-Identifier: Apache-2.0
"""The agent-loop workers of a run: verl's manager, whose workers are started again by Ray when they die.

Contract: what :meth:`TrajectoryManager.tell` told the workers is told to one that was started again, by
:meth:`TrajectoryManager.prepare`, before it has work. They are started again as often as they die: a prompt that ends
its worker costs its own group, and where nothing else happens any more, groups that fail in a row end the run. A
validation has a deadline; its answers go training's way (`recipe.async_engine.rollout.validation`). Shown by
tests/integration/test_trajectory_manager.py, test_validation.py and tests/e2e/test_replacement.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayActorError
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.utils.ray_utils import auto_await

from recipe.async_engine.actors.control import Restartable
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.rollout.reports import joined, reported_names, spread_reports
from recipe.async_engine.rollout.traced_groups import TracedGroups
from recipe.async_engine.rollout.trajectory_worker import TrajectoryWorker
from recipe.async_engine.rollout.validation import ValidationAnswers, with_stand_ins
from recipe.async_engine.rollout.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

HELD = ("run_trajectory", "finish_trajectory", "rescore")
"""What keeps calls of a worker open."""
CALLS_AT_ONCE = 15_000
"""Such calls of one worker at once; Ray's 1,000 would keep trajectories from their slots."""
AS_OFTEN_AS_IT_DIES = -1


class ValidationTimeout(RecipeError):
    """Validation took longer than ``async_training.timeouts.batch_wait``."""


class ValidationFailed(RecipeError):
    """No answer of a validation came through, nor had one before."""


class TrajectoryManager(AgentLoopManager):
    """See the module's contract; verl's validation goes through its ``generate_sequences``.

    Attributes:
        validation_slots: answers of a validation that may be generated at once.
        failed_validations: how many validations came to nothing, since each of their answers failed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = Restartable(
            self.worker_class(), AS_OFTEN_AS_IT_DIES, HELD, max_concurrency=CALLS_AT_ONCE
        )
        self._told: dict[str, tuple[Any, ...]] = {}
        # What is told last is what a worker is left with: the trainer's thread tells, the scheduler's prepares.
        self._telling = threading.Lock()
        self._deadline: float | None = None
        self.validation_slots = CALLS_AT_ONCE
        self.failed_validations = 0
        self._asked, self._errors, self._ever_answered = 0, list[RecipeError](), False
        # What rewards of validations have reported.
        self._reported: dict[Any, None] = {}
        self._columns: tuple[Any, ...] | None = None

    def worker_class(self) -> type[TrajectoryWorker]:
        """What the workers are; a user's manager has its own under it (`users_manager`)."""
        return TrajectoryWorker

    def tell(self, method: str, *arguments: Any, timeout_s: float) -> None:
        """Call a method of every worker; a dead one is called by :meth:`prepare`, should it be started again."""
        with self._telling:
            self._told[method] = arguments
            answers = [getattr(worker, method).remote(*arguments) for worker in self.agent_loop_workers]
        for answer in answers:
            with suppress(RayActorError):
                ray.get(answer, timeout=timeout_s)

    async def prepare(self, worker: Any) -> None:
        """Tell a worker that was started again what the others have been told, and that it may work."""
        with self._telling:
            answers = [getattr(worker, method).remote(*arguments) for method, arguments in self._told.items()]
        await asyncio.gather(*answers)
        await worker.be_prepared.remote()

    @contextmanager
    def validation(self, timeout_s: float) -> Iterator[None]:
        """A ``generate_sequences`` in it has ``timeout_s`` seconds from now.

        Raises:
            ValidationFailed: at its end, if each of its answers failed, and none of a validation before had come.
        """
        self._deadline, self._columns = time.monotonic() + timeout_s, None
        self._asked, self._errors = 0, []
        try:
            yield
        finally:
            self._deadline = None
        if self._errors and len(self._errors) == self._asked:
            self.failed_validations += 1
            said = f"each of the {self._asked} answers of a validation failed, the last one with: {self._errors[-1]}"
            if not self._ever_answered:
                raise ValidationFailed(said) from self._errors[-1]
            logger.error("%s", said)
        self._ever_answered |= len(self._errors) < self._asked

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The answers of a validation's batch, a row each; see the module's contract.

        Raises:
            ValidationTimeout: the time of :meth:`validation` is over.
        """
        settings = self.config.async_training
        samples = self.rollout_config.trace.get("max_samples_per_step_per_worker")
        traced = TracedGroups(None if samples is None else samples * len(self.agent_loop_workers))
        limits = settings.timeouts.startup, settings.timeouts.agent_worker
        pool = WorkerPool(self.agent_loop_workers, self.prepare, *limits, traced, validates=True)
        answers = ValidationAnswers(pool, self.validation_slots, int(settings.max_group_retries))
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            async with asyncio.timeout(left_s) as limit:
                outputs = await answers.of(prompts, int(prompts.meta_info.get("global_steps", -1)))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ValidationTimeout(
                "validation was not done within async_training.timeouts.batch_wait; raise it, or validate fewer "
                "prompts (data.val_max_samples)"
            ) from error
        finally:
            pool.stop()
        self._asked += len(outputs)
        self._errors += answers.errors
        lengths = self.rollout_config.prompt_length, self.rollout_config.response_length
        batch = joined(self, with_stand_ins(outputs, *lengths))
        spread_reports(batch, self._columns_of(batch), validation=True)
        # Times of each answer, of which verl's validation shows none.
        del batch.meta_info["metrics"]
        return batch

    def _columns_of(self, batch: DataProto) -> tuple[Any, ...]:
        """The same in all parts of a validation: verl has them in lists, and none may begin later than the others."""
        self._reported |= reported_names(batch)
        if self._columns is None:
            self._columns = tuple(self._reported)
        if late := self._reported.keys() - set(self._columns):
            logger.warning(
                "rewards report %s, as those of this validation's first batch did not: shown from the next one on",
                ", ".join(sorted(map(str, late))),
            )
        return self._columns

    def join(self, outputs: list[Any]) -> DataProto:
        """Join fetched trajectories into one batch as a worker does."""
        batch = joined(self, outputs)
        spread_reports(batch, reported_names(batch))
        return batch

# SPDX-License-Identifier: Apache-2.0
"""The agent-loop workers of a run: verl's manager, whose workers are started again by Ray when they die.

Contract: what :meth:`TrajectoryManager.tell` told the workers is told to one that was started again, by
:meth:`TrajectoryManager.prepare`, before it has work. Validation has a deadline, and the part of it that a worker had
when it died is done by another one. Shown by tests/integration/test_trajectory_manager.py and
tests/e2e/test_replacement.py.
"""

from __future__ import annotations

import asyncio
import copy
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

from recipe.async_engine.core.columns import REPORTED
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.recovery.restarts import Restartable
from recipe.async_engine.recovery.worker_set import WorkerDied, WorkerSet, as_handle
from recipe.async_engine.rollout.reports import joined, reported_names, spread_reports
from recipe.async_engine.rollout.soundness import RewardError
from recipe.async_engine.rollout.trajectory_worker import TrajectoryWorker
from recipe.async_engine.rollout.worker_pool import NONE_LEFT, NoWorkers

logger = logging.getLogger(__name__)

HELD = ("run_trajectory", "finish_trajectory", "generate_sequences", "rescore")
"""What keeps calls of a worker open."""
CALLS_AT_ONCE = 15_000
"""Such calls of one worker at once; Ray's 1,000 would keep trajectories from their slots."""


class ValidationTimeout(RecipeError):
    """Validation took longer than ``async_training.timeouts.validation``."""


def any_worker(workers: WorkerSet, first: str) -> Any:
    """Stands in for one of verl's handles in ``generate_sequences``: ``first``, or one that lives through it."""

    async def generate(part: DataProto) -> DataProto:
        name: str | None = first
        while name is not None:
            try:
                async with workers.one(name) as worker:
                    return await worker.generate_sequences.remote(part)
            except WorkerDied as error:
                logger.warning("a part of the validation is done by another worker: %s", error)
                name = workers.choose()
        raise NoWorkers(NONE_LEFT)

    return as_handle("generate_sequences", generate)


class TrajectoryManager(AgentLoopManager):
    """See the module's contract; verl's validation goes through its ``generate_sequences``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        restarts = int(self.config.async_training.max_replica_restarts)
        self.agent_loop_workers_class = Restartable(TrajectoryWorker, restarts, HELD, max_concurrency=CALLS_AT_ONCE)
        self._told: dict[str, tuple[Any, ...]] = {}
        # What is told last is what a worker is left with: the trainer's thread tells, the scheduler's prepares.
        self._telling = threading.Lock()
        self._deadline: float | None = None
        # What rewards of validations have reported, None before the first one that succeeded.
        self._reported: dict[str, None] | None = None
        self._columns: tuple[str, ...] | None = None

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
        """A ``generate_sequences`` in it has ``timeout_s`` seconds from now."""
        self._deadline, self._columns = time.monotonic() + timeout_s, None
        try:
            yield
        finally:
            self._deadline = None

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """As verl's; see the module's contract.

        Raises:
            ValidationTimeout: the time of :meth:`validation` is over.
            NoWorkers: all have died, and none is started again.
            RewardError: no answer of it has a score, and none had one before.
        """
        workers = WorkerSet("agent-loop", self.agent_loop_workers)
        of_any = copy.copy(self)
        of_any.agent_loop_workers = [any_worker(workers, name) for name in workers.actors]
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            async with asyncio.timeout(left_s) as limit:
                answers = await AgentLoopManager.generate_sequences(of_any, prompts)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ValidationTimeout(
                "validation was not done within async_training.timeouts.validation; raise it, or validate fewer "
                "prompts (data.val_max_samples)"
            ) from error
        finally:
            workers.stop()
        spread_reports(answers, self._columns_of(answers))
        return answers

    def _columns_of(self, answers: DataProto) -> tuple[str, ...]:
        """The same in all parts of a validation: verl has them in lists, and none may begin later than the others."""
        if self._reported is None:
            if all(report is None for report in answers.non_tensor_batch[REPORTED]):
                raise RewardError("no reward at all could be computed; the log above has an error for each answer")
            self._reported = {}
        self._reported |= reported_names(answers)
        if self._columns is None:
            self._columns = tuple(self._reported)
        if late := self._reported.keys() - set(self._columns):
            logger.warning(
                "rewards report %s, as those of this validation's first batch did not: shown from the next one on",
                ", ".join(sorted(late)),
            )
        return self._columns

    def join(self, outputs: list[Any]) -> DataProto:
        """Join fetched trajectories into one batch as a worker does."""
        batch = joined(self, outputs)
        spread_reports(batch, reported_names(batch))
        return batch

# SPDX-License-Identifier: Apache-2.0
"""Manages the agent-loop workers of a run, which Ray restarts when they die.

Contract: before a restarted worker gets work, :meth:`TrajectoryManager.prepare` repeats the calls that
:meth:`TrajectoryManager.tell` made to all workers. A worker is restarted however often it dies. If a prompt's
trajectories kill their workers, only the prompt's group fails. If too many groups fail in a row, the run ends. A
validation has a deadline, and its answers are generated in the same way as those of training
(`recipe.async_engine.rollout.validation`). Shown by tests/integration/test_trajectory_manager.py, test_validation.py
and tests/e2e/test_replacement.py.

A user's ``agent_loop_manager_class`` and its worker class become base classes of this package's classes, so users'
overrides apply to every verl method that this package calls. If a user's class overrides a method that this package
never calls, an error is raised before any process starts. Shown by tests/integration/test_users_manager.py.

The values that reward functions return besides the score become columns of the batch, one for each name that occurs in
any row. verl instead uses only the names in the first row, and fails if another row lacks one of them. If verl, the
data or an agent loop already uses a name, the column's name gets the prefix `OTHER_NAME`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.ray_utils import auto_await

from recipe.async_engine.actors.control import Restartable
from recipe.async_engine.core.columns import OTHER_NAME, REPORTED, TAKEN
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.rollout.group_run import RolloutFailed
from recipe.async_engine.rollout.trajectory_worker import TrajectoryWorker
from recipe.async_engine.rollout.validation import ValidationAnswers, with_stand_ins
from recipe.async_engine.rollout.worker_pool import TracedGroups, WorkerPool

logger = logging.getLogger(__name__)

HELD = ("run_trajectory", "finish_trajectory", "rescore")
"""Methods of a worker whose calls take long. Calls of its other methods need not wait for these (`Restartable`)."""
CALLS_AT_ONCE = 15_000
"""Largest number of open calls of one worker. With Ray's default of 1,000, trajectories would have to wait."""
AS_OFTEN_AS_IT_DIES = -1


class TrajectoryManager(AgentLoopManager):
    """verl's agent-loop manager, with workers that Ray restarts. verl's validation calls ``generate_sequences``.

    Attributes:
        validation_slots: number of validation answers that may be generated at once.
        failed_validations: number of validations in which every answer failed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = Restartable(
            self.worker_class(), AS_OFTEN_AS_IT_DIES, HELD, max_concurrency=CALLS_AT_ONCE
        )
        self._told: dict[str, tuple[Any, ...]] = {}
        # The trainer's thread calls `tell`, and the scheduler's thread calls `prepare`. This lock ensures that all
        # workers get the same calls in the same order.
        self._telling = threading.Lock()
        self._deadline: float | None = None
        self.validation_slots = CALLS_AT_ONCE
        self.failed_validations = 0
        self._asked, self._errors, self._ever_answered = 0, list[RecipeError](), False
        # The names of values that reward functions have returned in validations so far.
        self._reported: dict[Any, None] = {}
        self._columns: tuple[Any, ...] | None = None

    def worker_class(self) -> type[TrajectoryWorker]:
        """Return the class of the workers. `UsersManager` overrides this method to add the user's class as a base."""
        return TrajectoryWorker

    def tell(self, method: str, *arguments: Any, timeout_s: float) -> None:
        """Call ``method`` of every worker. If a worker is restarted later, :meth:`prepare` repeats the call there."""
        with self._telling:
            self._told[method] = arguments
            answers = [getattr(worker, method).remote(*arguments) for worker in self.agent_loop_workers]
        for answer in answers:
            with suppress(RayActorError):
                ray.get(answer, timeout=timeout_s)

    async def prepare(self, worker: Any) -> None:
        """Make the calls of :meth:`tell` again for a restarted worker, and then let the worker accept trajectories."""
        with self._telling:
            answers = [getattr(worker, method).remote(*arguments) for method, arguments in self._told.items()]
        await asyncio.gather(*answers)
        await worker.be_prepared.remote()

    @contextmanager
    def validation(self, timeout_s: float) -> Iterator[None]:
        """Limit all ``generate_sequences`` calls inside the ``with`` block to ``timeout_s`` seconds together.

        Raises:
            RolloutFailed: every answer of this validation failed, and so did every answer of all earlier ones.
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
                raise RolloutFailed(said) from self._errors[-1]
            logger.error("%s", said)
        self._ever_answered |= len(self._errors) < self._asked

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return the answers to a batch of validation prompts, one in each row.

        Raises:
            RolloutFailed: the deadline of :meth:`validation` has passed.
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
            raise RolloutFailed(
                "validation was not done within async_training.timeouts.batch_wait; raise this, or validate fewer "
                "prompts (data.val_max_samples)"
            ) from error
        finally:
            pool.stop()
        self._asked += len(outputs)
        self._errors += answers.errors
        lengths = self.rollout_config.prompt_length, self.rollout_config.response_length
        batch = joined(self, with_stand_ins(outputs, *lengths))
        spread_reports(batch, self._columns_of(batch), validation=True)
        # The timings of the answers are dropped, because verl's validation does not use them.
        del batch.meta_info["metrics"]
        return batch

    def _columns_of(self, batch: DataProto) -> tuple[Any, ...]:
        """Return the names of the columns with values from reward functions, the same for all batches of a validation.

        verl collects a column of all batches in one list, so a later batch must not have a column that the first lacks.
        """
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
        """Join trajectories into one training batch, in the form in which verl's worker returns it."""
        batch = joined(self, outputs)
        spread_reports(batch, reported_names(batch))
        return batch


SETTING = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
UNASKED: dict[type, tuple[str, ...]] = {
    AgentLoopManager: ("generate_sequences", "_performance_metrics"),
    AgentLoopWorker: ("generate_sequences", "_run_agent_loop", "_postprocess"),
}
"""Methods that verl calls for whole batches, by class. This package never calls them, as it runs single trajectories.
"""


def manager_class(name: str | None) -> type[TrajectoryManager]:
    """Return the manager class of a run: `TrajectoryManager`, or a subclass that also derives from the user's class.

    ``name`` is the import path of the user's class, or None.

    Raises:
        RolloutFailed: the user's class cannot be loaded, is not a subclass of verl's manager, or overrides a method in
            `UNASKED`, which would never be called.
    """
    if not name:
        return TrajectoryManager
    try:
        users = load_class_from_fqn(name, "AgentLoopManager")
    except Exception as error:  # a user's module may raise anything
        raise RolloutFailed(f"{SETTING}={name} cannot be loaded: {error}") from error
    _check(name, users, AgentLoopManager)
    if users is AgentLoopManager:
        return TrajectoryManager
    named: str = name

    class UsersManager(TrajectoryManager, users):  # type: ignore[misc, valid-type]
        def worker_class(self) -> type[TrajectoryWorker]:
            return worker_over(named, self.agent_loop_workers_class)

    return UsersManager


def worker_over(name: str, actor_class: Any) -> type[TrajectoryWorker]:
    """Return a class that derives from `TrajectoryWorker` and from the worker class of a user's manager.

    Args:
        name: the name of the user's manager class, for error messages.
        actor_class: the user's worker class, or the actor class that ``ray.remote`` made of it.

    Raises:
        RolloutFailed: the user's worker class is not a subclass of verl's, or overrides a method in `UNASKED`.
    """
    metadata = getattr(actor_class, "__ray_metadata__", None)
    users = actor_class if metadata is None else metadata.modified_class.__ray_actor_class__
    _check(f"{name}, whose workers are of", users, AgentLoopWorker)
    if issubclass(TrajectoryWorker, users):
        return TrajectoryWorker
    return type("UsersTrajectoryWorker", (TrajectoryWorker, users), {"__module__": users.__module__})


def _check(name: str, users: Any, verls: type) -> None:
    if not (isinstance(users, type) and issubclass(users, verls)):
        raise RolloutFailed(f"{SETTING}={name} {users!r}: the class is not a subclass of verl's {verls.__name__}")
    for method in UNASKED[verls]:
        if getattr(users, method) is not getattr(verls, method):
            raise RolloutFailed(
                f"{SETTING}={name} {users.__qualname__}: the class has a {method} of its own, which is never called: "
                "answers are generated one by one. Move the method's code into an agent loop (agent_loop_config_path), "
                "or into _agent_loop_postprocess or _compute_score of the workers"
            )


SCORE = "reward"
"""Name of the score in verl's validation metrics. No column of a validation batch may have this name."""


def joined(worker: Any, outputs: list[Any]) -> DataProto:
    """Join trajectories into a batch with verl's ``AgentLoopWorker._postprocess``.

    The values that reward functions returned besides the score become the column `REPORTED`, with a dict in each row.
    ``worker`` is passed as ``self`` to ``_postprocess``, which uses none of its attributes.
    """
    reports = [output.extra_fields.pop(REPORTED, {}) for output in outputs]
    batch = AgentLoopWorker._postprocess(worker, outputs)
    batch.non_tensor_batch[REPORTED] = np.fromiter(reports, dtype=object)
    return batch


def reported_names(batch: DataProto) -> dict[str, None]:
    return dict.fromkeys(name for report in batch.non_tensor_batch[REPORTED] for name in report or ())


def spread_reports(batch: DataProto, names: Iterable[Any], validation: bool = False) -> None:
    """Add a column to the batch for each of ``names``, with values from the dicts in the column `REPORTED`.

    A row whose dict lacks the name gets None, which verl's validation leaves out of its means.
    """
    taken = {*batch.batch.keys(), *batch.non_tensor_batch, *TAKEN, *([SCORE] if validation else [])}
    columns = []
    for name in names:
        column = str(name)
        while column in taken:
            column = f"{OTHER_NAME}{column}"
        taken.add(column)
        columns.append(column)
        values = [None if report is None else report.get(name) for report in batch.non_tensor_batch[REPORTED]]
        are_numbers = all(isinstance(value, bool | int | float | np.number) for value in values)
        batch.non_tensor_batch[column] = np.array(values) if are_numbers else np.fromiter(values, dtype=object)
    if "rm_scores" in batch.batch:
        batch.meta_info["reward_extra_keys"] = columns

# SPDX-License-Identifier: Apache-2.0
"""verl's reward workers, changed to run synchronous reward functions in a process pool.

Contract: all reward managers of verl work as in verl, except that each reward worker calls a synchronous reward
function in a pool of `reward_processes` processes. Asynchronous functions and reward models run as in verl. If the
reward function or the manager fails, the call raises `RewardFailed` with the text of the error. Results are plain
values, so that other processes need not unpickle users' classes. A failed call never gets a score of 0, whereas some of
verl's managers return 0 then. Ray restarts each dead worker up to `max_replica_restarts` times. `least_busy_worker`
chooses the worker for an answer. Shown by tests/integration/test_reward_pool.py, test_odd_rewards.py and
test_reward_dispatch.py.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from omegaconf import open_dict
from ray.exceptions import RayActorError
from verl import DataProto
from verl.experimental.reward_loop import RewardLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from verl.workers.rollout.replica import RolloutReplicaRegistry

from recipe.async_engine.actors.control import Restartable
from recipe.async_engine.actors.stacks import waits
from recipe.async_engine.actors.worker_set import WorkerSet, WorkersLost, as_handle
from recipe.async_engine.core.deadlines import REWARD_WORKER_S
from recipe.async_engine.core.plain import NotPlain, plain, told, traced
from recipe.async_engine.engines.protocol import engine_class
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.rewards.in_transit import InTransit
from recipe.async_engine.rewards.pool import COUNTS, RewardFailed, RewardProcessDied, ScoringPool, checked, number_of

HELD = ("compute_score", "compute_score_batch", "compute_score_disrm")
"""Methods of a reward worker that run for long. Calls of the worker's other methods do not wait for them."""
# File and name of verl's default reward function, which chooses a rule by the data source of the row.
DEFAULT_RULES = "pkg://verl.utils.reward_score", "default_compute_score"


TOLD = (RewardFailed, RewardProcessDied, NotPlain)
"""Errors that hold only text. Every process can unpickle them, so they are raised unchanged."""


class _PastManager(BaseException):
    """Carries the error of a reward function past a reward manager's ``except Exception`` clauses."""


class ScoringWorker(RewardLoopWorker):
    """verl's reward worker with a pool of processes for synchronous reward functions."""

    def _init_reward_fn(self) -> None:
        training, reward = self.config.async_training, self.config.reward
        manager = reward.reward_manager
        if manager.source == "register" and manager.name == "remote" and training.reward_processes > 0:
            # verl's `remote` manager does the same as its `naive` manager, but in actors that are never restarted. With
            # the pool such actors are not needed, so use `naive`.
            with open_dict(self.config):
                manager.name = "naive"
        try:
            super()._init_reward_fn()
        except BaseException as error:  # a user's file may raise anything, even SystemExit
            raise _as_text(error, "the reward cannot be loaded: ") from None
        self.pool: ScoringPool | None = None
        self._call_reward()

    def _call_reward(self) -> None:
        """Make the reward manager call the reward function in a process pool.

        If the function is not suited for a pool, or the run has none, verl's managers call the function by
        `_checked_call`, and a user's own manager is left unchanged.
        """
        training, reward, manager = self.config.async_training, self.config.reward, self.reward_manager
        if not hasattr(manager, "is_async_reward_score"):
            return
        pooled = training.reward_processes > 0 and not reward.reward_model.enable and not _has_sandbox(reward)
        call: Callable[..., Awaitable[Any]]
        if pooled and not manager.is_async_reward_score:
            self.pool = _pool(training, reward.custom_reward_function)
            call = self.pool.score
        elif not type(manager).__module__.startswith("verl."):
            # Leave a user's own manager unchanged, because it may depend on the function's results and exceptions.
            return
        else:
            call = partial(_checked_call, manager.compute_score, manager.is_async_reward_score)
        if isinstance(manager, RateLimitedRewardManager):
            # This manager would return a score of 0 for a call that failed or took too long.
            call = partial(_bypassing_manager, call, manager.timeout)
            manager.timeout = None
        manager.compute_score = call
        manager.is_async_reward_score = True

    async def be_ready(self) -> None:
        """Start all processes of the pool; raise RewardFailed if one of them cannot start."""
        if self.pool is not None:
            await self.pool.start()

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """Compute the reward of an answer, and return verl's result as plain values; raise one of `TOLD` on failure."""
        try:
            return _plain_answer(await super().compute_score(data))
        except _PastManager as failed:
            raise failed.args[0] from None
        except BaseException as error:  # a user's function or manager may raise anything
            raise _as_text(error) from None

    async def describe(self) -> list[str]:
        return [str(self.pool.stats if self.pool is not None else "no pool"), *(f"tasks: {line}" for line in waits())]

    async def pool_stats(self) -> tuple[int, dict[str, float]]:
        return os.getpid(), self.pool.stats if self.pool is not None else dict.fromkeys(COUNTS, 0)


def _has_sandbox(reward: Any) -> bool:
    """Return whether the reward uses verl's sandbox service. In that case the pool is not used, because its processes
    lack the semaphore with which verl limits the calls to the sandbox.
    """
    return bool((reward.get("sandbox_fusion") or {}).get("url"))


def _pool(training: Any, custom: Any) -> ScoringPool:
    path, name = (custom.path, custom.name) if custom.path else DEFAULT_RULES
    gib = training.reward_memory_gib
    return ScoringPool(
        path,
        name,
        dict(custom.get("reward_kwargs") or {}) if custom.path else {},
        processes=training.reward_processes,
        timeout_s=training.timeouts.reward,
        memory_bytes=None if gib is None else int(gib * (1 << 30)),
    )


async def _checked_call(function: Callable[..., Any], awaits: bool, **arguments: Any) -> Any:
    """Call a reward function, in a thread unless it is async, and raise its errors as `RewardFailed` with their text.

    Errors are converted at once, because a task or future cannot hold some exceptions, such as StopIteration.
    """

    def call() -> Any:
        try:
            return checked(function(**arguments))
        except BaseException as error:
            raise _as_text(error) from None

    if not awaits:
        return await asyncio.to_thread(call)
    try:
        return checked(await function(**arguments))
    except BaseException as error:
        raise _as_text(error) from None


async def _bypassing_manager(call: Callable[..., Awaitable[Any]], timeout_s: float | None, **arguments: Any) -> Any:
    """Await ``call(**arguments)`` within ``timeout_s`` seconds, the reward manager's time limit.

    An error is raised inside a `_PastManager`, which reward managers do not catch, so that the error reaches
    `ScoringWorker.compute_score`.
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await call(**arguments)
    except TimeoutError as error:
        took = f"the reward function gave nothing within {timeout_s:g} s (reward.timeout)" if limit.expired() else ""
        raise _PastManager(RewardFailed(took or told(error))) from None
    except Exception as error:
        raise _PastManager(error) from None


def _as_text(error: BaseException, words: str = "") -> BaseException:
    """Return a `RewardFailed` with the text of ``error``, because other processes may lack the class of ``error``."""
    if type(error) in TOLD or (issubclass(type(error), asyncio.CancelledError) and _is_cancelled()):
        return error
    failed = RewardFailed(f"{words}{told(error)}")
    if trace := traced(error):
        failed.add_note(trace)
    return failed


def _is_cancelled() -> bool:
    """Return whether the current task was cancelled. If it was not, a CancelledError comes from users' code."""
    with suppress(RuntimeError):  # this thread may have no event loop
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def _plain_answer(answer: Any) -> dict[str, Any]:
    """Return a reward manager's result as plain values, in the form that verl's agent loops expect.

    Raises:
        NotPlain: the result cannot be converted. The message says which element of the result is wrong.
    """
    if not isinstance(answer, dict) or "reward_score" not in answer:
        raise NotPlain(f"the reward manager returned a {type(answer).__name__} without reward_score")
    given = plain(answer, "the reward manager's result")
    # verl's agent loops expect reward_extra_info, which verl's code for reward models does not provide.
    return {"reward_extra_info": {}, **given, "reward_score": number_of(answer["reward_score"], given["reward_score"])}


class ScoringManager(RewardLoopManager):
    """verl's manager of reward workers, which are `ScoringWorker`s here. Reward models use this package's engines."""

    def __init__(self, config: Any, reservations: Reservations | None = None) -> None:
        if config.reward.reward_model.enable:
            name = config.reward.reward_model.rollout.name
            replica = partial(engine_class(name), reservations=reservations)
            RolloutReplicaRegistry.register(name, lambda: replica)
        super().__init__(config)

    def _init_reward_loop_workers(self) -> None:
        # Replace the worker class that verl's constructor has set.
        restarts = int(self.config.async_training.max_replica_restarts)
        self.reward_loop_workers_class = Restartable(ScoringWorker, restarts, HELD)
        super()._init_reward_loop_workers()
        self._asked: list[Any] = []
        # The statistics of each reward worker's process pool, by the number and the process id of the worker. A
        # restarted worker has an entry for each process id that it has had.
        self._counts: dict[tuple[int, int], dict[str, float]] = {}

    def until_ready(self, timeout_s: float) -> None:
        """Wait until all workers and their processes have started; raise the error of a worker that could not start."""
        ray.get([worker.be_ready.remote() for worker in self.reward_loop_workers], timeout=timeout_s)

    def metrics(self) -> dict[str, float]:
        """Return the pools' statistics, and the number of workers' restarts that were noticed.

        Each call requests statistics that a later call returns, so that no call has to wait for a busy worker.
        """
        if not self._asked or not ray.wait(self._asked, num_returns=len(self._asked), timeout=0)[1]:
            for worker, answer in enumerate(self._asked):
                try:
                    process, counts = ray.get(answer, timeout=1)
                except RayActorError:
                    continue  # the worker is dead or being restarted
                for (other, _), past in self._counts.items():
                    past["pending"] *= other != worker
                self._counts[worker, process] = counts
            self._asked = [worker.pool_stats.remote() for worker in self.reward_loop_workers]
        totals = {key: sum(counts[key] for counts in self._counts.values()) for key in COUNTS}
        totals["worker_restarts"] = len(self._counts) - len({worker for worker, _ in self._counts})
        return {f"fully_async/rewards/{key}": value for key, value in totals.items()}


def least_busy_worker(actors: Sequence[Any]) -> Any:
    """Return an object that can be used like the handle of one reward worker, but sends each call to the worker with
    the fewest open calls from this object.

    verl instead chooses a worker at random. Workers that died, do not respond or fail often are avoided if there are
    others (`actors/worker_set.py`). When a caller gives up a call, the object checks whether the worker responds. If no
    worker is available, a call waits for one until the caller gives up. Only one event loop may use the object.
    """
    workers = WorkerSet("reward", actors, REWARD_WORKER_S * random.uniform(1.0, 1.5))

    async def score(data: Any) -> dict[str, Any]:
        """Call verl's ``compute_score``; raise WorkerDied if the worker died, RewardFailed if all workers have died."""
        try:
            return await workers.ask(lambda worker: worker.compute_score.remote(InTransit(data)))
        except WorkersLost as error:
            raise RewardFailed(str(error)) from error

    return as_handle("compute_score", score)

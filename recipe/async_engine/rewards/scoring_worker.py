# SPDX-License-Identifier: Apache-2.0
"""verl's reward workers, with synchronous reward functions in a process pool.

Contract: every reward manager of verl works as it does; only its call of a synchronous function goes to the pool
(`reward_processes` of them for each reward worker). Asynchronous functions and reward models are left to verl. Whatever
fails, the function or the manager around it, fails the call with text (`RewardFailed`), and what they give leaves the
worker as plain values: nothing of the user's has to be unpickled elsewhere. A manager of verl's that makes a score of 0
of a failed call does not get to see it. A worker that died is started again by Ray, up to `max_replica_restarts` times
each; which worker scores an answer is `least_busy_worker`'s to say. Shown by tests/integration/test_reward_pool.py,
test_odd_rewards.py and test_reward_dispatch.py.
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
from recipe.async_engine.actors.worker_set import WorkerDied, WorkerSet, as_handle
from recipe.async_engine.core.plain import NotPlain, plain, told, traced
from recipe.async_engine.engines.protocol import engine_class
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.rewards.in_transit import InTransit
from recipe.async_engine.rewards.pool import COUNTS, RewardFailed, RewardProcessDied, ScoringPool, checked, number_of

HELD = ("compute_score", "compute_score_batch", "compute_score_disrm")
"""What keeps calls of a reward worker open."""
ANSWER_S = 30.0
"""How long a worker may take to say that it is there; half as much again at most, by chance, so that of several that
ask it only one ends it."""
# Where verl's own rules are; each call looks at its row's data source.
DEFAULT_RULES = "pkg://verl.utils.reward_score", "default_compute_score"


TOLD = (RewardFailed, RewardProcessDied, NotPlain)
"""Errors that are text already."""


class _Failed(BaseException):
    """The error of a failed call, for `ScoringWorker.compute_score`: past an ``except Exception`` on its way."""


class ScoringWorker(RewardLoopWorker):
    """A reward worker with a pool beside it."""

    def _init_reward_fn(self) -> None:
        training, reward = self.config.async_training, self.config.reward
        manager = reward.reward_manager
        if manager.source == "register" and manager.name == "remote" and training.reward_processes > 0:
            # The pool is what it is for: `naive` with the function in other processes, actors that nobody replaces.
            with open_dict(self.config):
                manager.name = "naive"
        try:
            super()._init_reward_fn()
        except BaseException as error:  # a user's file may raise anything, and end an interpreter
            raise _as_text(error, "the reward cannot be loaded: ") from None
        self.pool: ScoringPool | None = None
        self._call_reward()

    def _call_reward(self) -> None:
        """Have the manager call the reward function by way of the pool, or so that an error of its is text."""
        training, reward, manager = self.config.async_training, self.config.reward, self.reward_manager
        if not hasattr(manager, "is_async_reward_score"):
            return
        pooled = training.reward_processes > 0 and not reward.reward_model.enable and not _has_sandbox(reward)
        call: Callable[..., Awaitable[Any]]
        if pooled and not manager.is_async_reward_score:
            self.pool = _pool(training, reward.custom_reward_function)
            call = self.pool.score
        elif not type(manager).__module__.startswith("verl."):
            # The user's, which calls the function in this process and may know what it gives and raises.
            return
        else:
            call = partial(_checked_call, manager.compute_score, manager.is_async_reward_score)
        if isinstance(manager, RateLimitedRewardManager):
            # It would give 0 for what failed or took too long.
            call = partial(_past_the_manager, call, manager.timeout)
            manager.timeout = None
        manager.compute_score = call
        manager.is_async_reward_score = True

    async def be_ready(self) -> None:
        """Return once no call will wait for a process to start; RewardFailed if one cannot."""
        if self.pool is not None:
            await self.pool.start()

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """As verl's, but of plain values; RewardFailed, or another error of `pool`, if there is no reward."""
        try:
            return _plain_answer(await super().compute_score(data))
        except _Failed as failed:
            raise failed.args[0] from None
        except BaseException as error:  # a user's function or manager may raise anything
            raise _as_text(error) from None

    async def describe(self) -> list[str]:
        """Lines: the pool's counts, and where the coroutines wait."""
        return [str(self.pool.stats if self.pool is not None else "no pool"), *(f"tasks: {line}" for line in waits())]

    async def pool_stats(self) -> tuple[int, dict[str, float]]:
        """The worker's process, and its pool's counts so far."""
        return os.getpid(), self.pool.stats if self.pool is not None else dict.fromkeys(COUNTS, 0)


def _has_sandbox(reward: Any) -> bool:
    """verl's sandbox service comes with a semaphore that only its own threads share."""
    return bool((reward.get("sandbox_fusion") or {}).get("url"))


def _pool(training: Any, custom: Any) -> ScoringPool:
    """The pool of the configured reward function, or of verl's own rules."""
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
    """What a function gives, called here or in a thread; only exceptions leave it that a task or a future can have."""

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


async def _past_the_manager(call: Callable[..., Awaitable[Any]], timeout_s: float | None, **arguments: Any) -> Any:
    """The call within the manager's own time; its error is none that the manager could catch."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await call(**arguments)
    except TimeoutError as error:
        took = f"the reward function gave nothing within {timeout_s:g} s (reward.timeout)" if limit.expired() else ""
        raise _Failed(RewardFailed(took or told(error))) from None
    except Exception as error:
        raise _Failed(error) from None


def _as_text(error: BaseException, words: str = "") -> BaseException:
    """The error to raise in the place of this one, which other processes may not know."""
    if type(error) in TOLD or (issubclass(type(error), asyncio.CancelledError) and _is_cancelled()):
        return error
    failed = RewardFailed(f"{words}{told(error)}")
    if trace := traced(error):
        failed.add_note(trace)
    return failed


def _is_cancelled() -> bool:
    """Whether the task of now was cancelled, and no user's code raised CancelledError by itself."""
    with suppress(RuntimeError):  # no event loop in this thread
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def _plain_answer(answer: Any) -> dict[str, Any]:
    """What a reward manager gave, as verl's agent loops take it, of plain values.

    Raises:
        NotPlain: it is not; the message names the place in it.
    """
    if not isinstance(answer, dict) or "reward_score" not in answer:
        raise NotPlain(f"the reward manager gave {type(answer).__name__} without reward_score")
    given = plain(answer, "what the reward manager gave")
    # verl's agent loops want a report, which its own path for a reward model does not have.
    return {"reward_extra_info": {}, **given, "reward_score": number_of(answer["reward_score"], given["reward_score"])}


class ScoringManager(RewardLoopManager):
    """verl's manager over :class:`ScoringWorker` s; the servers of a reward model are like those of the rollout."""

    def __init__(self, config: Any, reservations: Reservations | None = None) -> None:
        if config.reward.reward_model.enable:
            name = config.reward.reward_model.rollout.name
            replica = partial(engine_class(name), reservations=reservations)
            RolloutReplicaRegistry.register(name, lambda: replica)
        super().__init__(config)

    def _init_reward_loop_workers(self) -> None:
        # verl's constructor has just set its own class.
        restarts = int(self.config.async_training.max_replica_restarts)
        self.reward_loop_workers_class = Restartable(ScoringWorker, restarts, HELD)
        super()._init_reward_loop_workers()
        self._asked: list[Any] = []
        # By worker and process, those that have died since included.
        self._counts: dict[tuple[int, int], dict[str, float]] = {}

    def until_ready(self, timeout_s: float) -> None:
        """Return once every worker is made and its processes are; raises what has failed there."""
        ray.get([worker.be_ready.remote() for worker in self.reward_loop_workers], timeout=timeout_s)

    def metrics(self) -> dict[str, float]:
        """The pools' counts, as of the call before this one: nothing waits for a busy worker.

        ``worker_restarts``: workers that were found in another process than before.
        """
        if not self._asked or not ray.wait(self._asked, num_returns=len(self._asked), timeout=0)[1]:
            for worker, answer in enumerate(self._asked):
                try:
                    process, counts = ray.get(answer, timeout=1)
                except RayActorError:
                    continue  # dead, or being started again: whoever has calls there says so
                for (other, _), past in self._counts.items():
                    past["pending"] *= other != worker
                self._counts[worker, process] = counts
            self._asked = [worker.pool_stats.remote() for worker in self.reward_loop_workers]
        totals = {key: sum(counts[key] for counts in self._counts.values()) for key in COUNTS}
        totals["worker_restarts"] = len(self._counts) - len({worker for worker, _ in self._counts})
        return {f"fully_async/rewards/{key}": value for key, value in totals.items()}


def least_busy_worker(actors: Sequence[Any]) -> Any:
    """Stands in for a handle of verl's reward workers, of which it asks the one with the fewest calls of this process.

    verl takes one at random. What a call raises, its caller gets; a further attempt goes to another worker than one
    that died or does not answer, if there is another (`actors/worker_set.py`), and one whose calls fail is not
    preferred for being idle. A worker is asked whether it answers when a call of it was given up. Where none can be
    asked a call waits for one; the caller has the deadline. Used on one event loop.
    """
    workers = WorkerSet("reward", actors, ANSWER_S * random.uniform(1.0, 1.5))
    last: list[WorkerDied] = []

    async def score(data: Any) -> dict[str, Any]:
        """verl's ``RewardLoopWorker.compute_score``; RewardFailed if all have died, WorkerDied if the worker did."""
        while (name := workers.choose()) in workers.silent:
            await workers.news()
        try:
            if name is not None:
                async with workers.one(name) as worker:
                    answer = await worker.compute_score.remote(InTransit(data))
                workers.note(name, failed=False)
                return answer
        except WorkerDied as error:
            last[:] = [error]
            # It may have been waited for in vain, and have been the last one.
            if not workers.lost:
                raise
        except Exception:
            if name is not None:
                workers.note(name, failed=True)
            raise
        except asyncio.CancelledError:
            # Past its deadline, usually.
            workers.doubt(name)
            raise
        raise RewardFailed(
            f"every reward worker has died; the last one: {last[0] if last else 'before its first call'}"
        )

    return as_handle("compute_score", score)

# SPDX-License-Identifier: Apache-2.0
"""verl's reward workers, with synchronous reward functions in a process pool.

Contract: every reward manager of verl works as it does; only its call of a synchronous function goes to the pool
(`reward_processes` of them for each reward worker). Asynchronous functions and reward models are left to verl. Whatever
fails, the function or the manager around it, fails the call with text (`RewardRaised`), and what they give leaves the
worker as plain values: nothing of the user's has to be unpickled elsewhere. A manager of verl's that makes a score of 0
of a failed call does not get to see it. A worker that died is started again by Ray, up to `max_replica_restarts` times
each. Shown by tests/integration/test_reward_pool.py and test_odd_rewards.py.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
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
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.plain import NotPlain, plain, told, traced
from recipe.async_engine.engines.protocol import engine_class
from recipe.async_engine.engines.reservation import Reservations
from recipe.async_engine.rewards.pool import COUNTS, RewardProcessDied, RewardRaised, RewardTimeout, ScoringPool
from recipe.async_engine.rewards.scorer import checked, number_of

HELD = ("compute_score", "compute_score_batch", "compute_score_disrm")
"""What keeps calls of a reward worker open."""
# Where verl's own rules are; each call looks at its row's data source.
DEFAULT_RULES = "pkg://verl.utils.reward_score", "default_compute_score"


TOLD = (RewardRaised, RewardTimeout, RewardProcessDied, NotPlain)
"""Errors that are text already."""


class RewardNotMade(RecipeError):
    """A reward worker could not load its function or make its manager."""


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
            raise _as_text(error, RewardNotMade, "the reward cannot be loaded: ") from None
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
        elif manager.is_async_reward_score:
            call = partial(_checked_call, manager.compute_score)
        else:
            call = partial(asyncio.to_thread, _checked_in_thread, manager.compute_score)
        if isinstance(manager, RateLimitedRewardManager):
            # It would give 0 for what failed or took too long.
            call = partial(_past_the_manager, call, manager.timeout)
            manager.timeout = None
        manager.compute_score = call
        manager.is_async_reward_score = True

    async def be_ready(self) -> None:
        """Return once no call will wait for a process to start; RewardRaised if one cannot."""
        if self.pool is not None:
            await self.pool.start()

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """As verl's, but of plain values; RewardRaised, or another error of `pool`, if there is no reward."""
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


async def _checked_call(function: Callable[..., Any], **arguments: Any) -> Any:
    """What an asynchronous function gives; only exceptions leave it that no task of verl's is ended by."""
    try:
        return checked(await function(**arguments))
    except BaseException as error:
        raise _as_text(error) from None


def _checked_in_thread(function: Callable[..., Any], **arguments: Any) -> Any:
    """What a synchronous function gives; only exceptions leave it that a future can have."""
    try:
        return checked(function(**arguments))
    except BaseException as error:
        raise _as_text(error) from None


async def _past_the_manager(call: Callable[..., Awaitable[Any]], timeout_s: float | None, **arguments: Any) -> Any:
    """The call within the manager's own time; its error is none that the manager could catch."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await call(**arguments)
    except TimeoutError as error:
        took = f"the reward function gave nothing within {timeout_s:g} s (reward.timeout)" if limit.expired() else ""
        raise _Failed(RewardRaised(took or told(error))) from None
    except Exception as error:
        raise _Failed(error) from None


def _as_text(error: BaseException, kind: type[RecipeError] = RewardRaised, words: str = "") -> BaseException:
    """The error to raise in the place of this one, which other processes may not know."""
    if type(error) in TOLD or (issubclass(type(error), asyncio.CancelledError) and _is_cancelled()):
        return error
    failed = kind(f"{words}{told(error)}")
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


class PoolTotals:
    """The counts of all pools, those of workers that have died since included."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], dict[str, float]] = {}

    def note(self, worker: int, process: int, counts: dict[str, float]) -> None:
        """What a worker has answered."""
        for (other, _), past in self._counts.items():
            if other == worker:
                past["pending"] = 0
        self._counts[worker, process] = counts

    def totals(self) -> dict[str, float]:
        """Of all processes; ``worker_restarts``: workers that were found in another process than before."""
        totals = {key: sum(counts[key] for counts in self._counts.values()) for key in COUNTS}
        return {**totals, "worker_restarts": len(self._counts) - len({worker for worker, _ in self._counts})}


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
        self._pools = PoolTotals()

    def until_ready(self, timeout_s: float) -> None:
        """Return once every worker is made and its processes are; raises what has failed there."""
        ray.get([worker.be_ready.remote() for worker in self.reward_loop_workers], timeout=timeout_s)

    def metrics(self) -> dict[str, float]:
        """The pools' counts, as of the call before this one: nothing waits for a busy worker."""
        rest = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)[1] if self._asked else []
        if not rest:
            for worker, answer in enumerate(self._asked):
                try:
                    self._pools.note(worker, *ray.get(answer, timeout=1))
                except RayActorError:
                    continue  # dead, or being started again: whoever has calls there says so
            self._asked = [worker.pool_stats.remote() for worker in self.reward_loop_workers]
        return {f"fully_async/rewards/{key}": value for key, value in self._pools.totals().items()}

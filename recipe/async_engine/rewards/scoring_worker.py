# SPDX-License-Identifier: Apache-2.0
"""verl's reward workers, with synchronous reward functions in a process pool.

Contract: every reward manager of verl works as it does; only its call of a synchronous function goes to the pool
(`reward_processes` of them for each reward worker). Asynchronous functions and reward models are left to verl. A worker
that died is started again by Ray, up to `max_replica_restarts` times each. Shown by
tests/integration/test_reward_pool.py.
"""

import inspect
import os
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError
from verl.experimental.reward_loop import RewardLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.workers.rollout.replica import RolloutReplicaRegistry

from recipe.async_engine.recovery.restarts import Restartable
from recipe.async_engine.recovery.stacks import waits
from recipe.async_engine.replicas.replica import GatedVLLMReplica
from recipe.async_engine.replicas.reservation import Reservations
from recipe.async_engine.rewards.pool import COUNTS, ScoringPool

HELD = ("compute_score", "compute_score_batch", "compute_score_disrm")
"""What keeps calls of a reward worker open."""
# Where verl's own rules are; each call looks at its row's data source.
DEFAULT_RULES = "pkg://verl.utils.reward_score", "default_compute_score"


class ScoringWorker(RewardLoopWorker):
    """A reward worker with a pool beside it."""

    def _init_reward_fn(self) -> None:
        super()._init_reward_fn()
        self.pool: ScoringPool | None = None
        training, reward, manager = self.config.async_training, self.config.reward, self.reward_manager
        pooled = training.reward_processes > 0 and not reward.reward_model.enable and not _has_sandbox(reward)
        if not pooled or not hasattr(manager, "is_async_reward_score") or manager.is_async_reward_score:
            return
        custom = reward.custom_reward_function
        path, name = (custom.path, custom.name) if custom.path else DEFAULT_RULES
        gib = training.reward_memory_gib
        self.pool = ScoringPool(
            path,
            name,
            dict(custom.get("reward_kwargs") or {}) if custom.path else {},
            processes=training.reward_processes,
            timeout_s=training.timeouts.reward,
            memory_bytes=None if gib is None else int(gib * (1 << 30)),
        )
        manager.compute_score = self.pool.score
        manager.is_async_reward_score = True
        assert inspect.iscoroutinefunction(manager.compute_score)

    async def describe(self) -> list[str]:
        """Lines: the pool's counts, and where the coroutines wait."""
        return [str(self.pool.stats if self.pool is not None else "no pool"), *(f"tasks: {line}" for line in waits())]

    async def pool_stats(self) -> tuple[int, dict[str, float]]:
        """The worker's process, and its pool's counts so far."""
        return os.getpid(), self.pool.stats if self.pool is not None else dict.fromkeys(COUNTS, 0)


def _has_sandbox(reward: Any) -> bool:
    """verl's sandbox service comes with a semaphore that only its own threads share."""
    return bool((reward.get("sandbox_fusion") or {}).get("url"))


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
            replica = partial(GatedVLLMReplica, reservations=reservations)
            RolloutReplicaRegistry.register("vllm", lambda: replica)
        super().__init__(config)

    def _init_reward_loop_workers(self) -> None:
        # verl's constructor has just set its own class.
        restarts = int(self.config.async_training.max_replica_restarts)
        self.reward_loop_workers_class = Restartable(ScoringWorker, restarts, HELD)
        super()._init_reward_loop_workers()
        self._asked: list[Any] = []
        self._pools = PoolTotals()

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

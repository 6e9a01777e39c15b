# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a run side by side: training workers, rollout replicas, reward and agent-loop workers.

Contract: everything that takes long (imports, engines) starts at once, and the whole has one deadline
(``async_training.timeouts.startup``). What fails first ends the start with its own error.
"""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.rewards.workers import ScoringManager
from recipe.async_engine.rollout.agents import TrajectoryManager
from recipe.async_engine.rollout.client import ResumingClient
from recipe.async_engine.rollout.replicas import ReplicaManager


class StartupTimeout(RecipeError):
    """Not everything came up within ``async_training.timeouts.startup``."""


@dataclass(frozen=True)
class RolloutSide:
    """The processes that generate and score."""

    replicas: ReplicaManager
    agents: TrajectoryManager
    rewards: ScoringManager


def start_rollout(config: Any) -> RolloutSide:
    """Create the rollout side; returns when the replicas' servers are up, holding no weights yet."""
    side = start_agents(config)
    side.replicas.launch()
    return side


def start_agents(config: Any) -> RolloutSide:
    """Create the rollout side up to the replicas' servers, which are to be launched."""
    rewards = ScoringManager(config=config)
    replicas = ReplicaManager(config)
    agents = TrajectoryManager.create(
        config=config,
        llm_client=replicas.get_client(ResumingClient),
        reward_loop_worker_handles=rewards.reward_loop_worker_handles,
    )
    return RolloutSide(replicas, agents, rewards)


def side_by_side(parts: dict[str, Callable[[], Any]], timeout_s: float) -> dict[str, Any]:
    """Run ``parts`` on a thread each and return their results by name.

    Raises:
        StartupTimeout: one of them is not done in time; the message names it.
        Exception: whatever the first part to fail raised.
    """
    pool = ThreadPoolExecutor(max_workers=len(parts), thread_name_prefix="startup")
    began = time.monotonic()
    futures: dict[str, Future] = {name: pool.submit(part) for name, part in parts.items()}
    done, pending = wait(futures.values(), timeout=timeout_s, return_when=FIRST_EXCEPTION)
    # Threads that still wait for a process are left to it: the job ends, and its processes with it.
    pool.shutdown(wait=False, cancel_futures=True)
    for future in done:
        if future.exception() is not None:
            raise future.exception()
    if pending:
        late = [name for name, future in futures.items() if future in pending]
        raise StartupTimeout(
            f"{', '.join(late)} not up after {time.monotonic() - began:.0f} s; raise async_training.timeouts.startup "
            "if the model is large, and check that the cluster has the accelerators that trainer.n_gpus_per_node and "
            "rollout.n_gpus_per_node ask for"
        )
    return {name: future.result() for name, future in futures.items()}

# SPDX-License-Identifier: Apache-2.0
"""Profiles the steps of ``global_profiler.steps`` with verl's own profilers.

Contract: the profile of a step begins when the trainer begins to wait for the step's batch, and ends when the batch is
trained, before the weights are published. The rollout engines that ``rollout.profiler`` selects are profiled for all
this time, and the training workers only while the batch is trained. With ``profile_continuous_steps``, consecutive
steps share one trace. verl's finish hook runs once, after the last step of ``global_profiler.steps``, or after the
run's last step if that is profiled. If a replica cannot be profiled, only its own trace is missing. Shown by
tests/integration/test_profile_stage.py and tests/e2e/test_trainer_features.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from verl.workers.rollout.replica import RolloutReplica

from recipe.async_engine.weights.replica_set import generates

logger = logging.getLogger(__name__)


class ProfileStage:
    """Starts and stops the profilers. The trainer's thread calls the methods.

    Args:
        profiler: the section ``global_profiler`` of the configuration.
        replicas: returns the replicas that may be profiled.
        profile: starts or stops the training workers' profilers (`Stages.profile`).
        timeout_s: deadline of the replicas' answers, in seconds.
    """

    def __init__(
        self,
        profiler: Any,
        replicas: Callable[[], Iterable[RolloutReplica]],
        profile: Callable[..., None],
        timeout_s: float,
    ) -> None:
        self._steps = frozenset(profiler.steps or ())
        self._in_a_row = bool(profiler.profile_continuous_steps)
        self._replicas, self._profile, self._timeout_s = replicas, profile, timeout_s
        self._engines = self._workers = False

    def begin(self, step: int) -> None:
        """If ``step`` is to be profiled, start the rollout engines' profilers. Call this before waiting for a batch."""
        if step in self._steps and not self._engines:
            self._engines = True
            self._ask("start_profile")

    def train(self, step: int) -> None:
        """If ``step`` is to be profiled, start the training workers' profilers. Call this before a batch is trained."""
        if step in self._steps and not self._workers:
            self._workers = True
            self._profile(start=True)

    def end(self, step: int, is_last: bool) -> None:
        """Stop the profilers, unless the next step continues the trace. Call this after a step, or at the run's end."""
        if self._in_a_row and step + 1 in self._steps and not is_last:
            return
        if self._workers:
            self._workers = False
            self._profile(start=False, run_hook=is_last or step == max(self._steps))
        if self._engines:
            self._engines = False
            self._ask("stop_profile")

    def _ask(self, method: str) -> None:
        servers = [server for replica in self._replicas() if generates(replica) for server in replica.servers]
        try:
            ray.get([getattr(server, method).remote() for server in servers], timeout=self._timeout_s)
        except (GetTimeoutError, RayError) as error:
            logger.warning("rollout engines may not have a trace of this step (%s): %s", method, error)

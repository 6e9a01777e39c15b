# SPDX-License-Identifier: Apache-2.0
"""Profiles the steps of ``global_profiler.steps`` with verl's own profilers.

Contract: a profiled step is profiled from the wait for its batch to the end of its training, before its weights are
published. The rollout engines that ``rollout.profiler`` selects are profiled during all of it, the training workers
from the beginning of their work. With ``profile_continuous_steps``, consecutive steps are one trace. The finish hook
runs once, after the last of these steps, or after the run's last step if that is profiled. A replica that cannot be
profiled loses only its own trace.

Shown by tests/integration/test_profile_stage.py and tests/e2e/test_trainer_features.py.
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
    """Profiles as the module's contract says. The trainer's thread calls it.

    Args:
        profiler: the section ``global_profiler``.
        replicas: returns the present replicas.
        profile: starts or stops the training workers' profilers (`Stages.profile`).
        timeout_s: the deadline of the replicas.
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
        """Begin to profile the engines, because this step's batch is waited for."""
        if step in self._steps and not self._engines:
            self._engines = True
            self._ask("start_profile")

    def train(self, step: int) -> None:
        """Begin to profile the training workers, because the step's training begins."""
        if step in self._steps and not self._workers:
            self._workers = True
            self._profile(start=True)

    def end(self, step: int, is_last: bool) -> None:
        """End the profile, because the step's training is over or there is no batch for it."""
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

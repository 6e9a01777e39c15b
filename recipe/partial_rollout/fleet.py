# SPDX-License-Identifier: Apache-2.0
"""Starts a rollout replica again that was lost on the accelerators that trainer and rollout share.

Contract: before a publication, at which every trainer rank hands its weights to the engine beside it, whatever died in
the generation turn is started again at its place, as far as the budget goes; the publication waits for it.

Shown by tests/integration/test_turn_publisher.py and tests/e2e/test_lost_replica.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from verl.workers.rollout.replica import RolloutReplica

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.trainer.fleet import Fleet
from recipe.async_engine.weights.publisher import StagedVersion
from recipe.partial_rollout.publisher import TurnPublisher

logger = logging.getLogger(__name__)


class ReplicaLost(RecipeError):
    """A rollout replica died, and none could be started at its place."""


class TurnFleet(Fleet):
    """See the module's contract.

    Args:
        restart: starts a lost replica again; returns when it is up, without weights.
        budget: restarts in all.
    """

    publisher: TurnPublisher

    def __init__(
        self, publisher: TurnPublisher, restart: Callable[[RolloutReplica], RolloutReplica], budget: int
    ) -> None:
        super().__init__(publisher)
        self._restart = restart
        self._budget = budget
        self._restarts = 0

    @property
    def restarts(self) -> int:
        return self._restarts

    def stage(self, version: int) -> StagedVersion:
        """See :meth:`WeightPublisher.stage`.

        Raises:
            ReplicaLost: one died and the budget is used up, or it did not start.
        """
        cause = self.publisher.find_dead()
        for lost in self.publisher.take_lost():
            self.publisher.add_replicas([self._in_place_of(lost, cause)])
        return self.publisher.stage(version)

    def _in_place_of(self, lost: RolloutReplica, cause: str) -> RolloutReplica:
        if self._restarts >= self._budget:
            raise ReplicaLost(
                f"rollout replica {lost.replica_rank} died ({cause}) and {self._restarts} have been started again: "
                f"async_training.max_replica_restarts={self._budget}"
            )
        self._restarts += 1
        logger.warning("rollout replica %d died and is started again: %s", lost.replica_rank, cause)
        try:
            return self._restart(lost)
        except Exception as error:  # whatever kept it from starting is the run's end
            what = f"rollout replica {lost.replica_rank} died ({cause}) and could not be started again"
            raise ReplicaLost(f"{what}: {error}") from error

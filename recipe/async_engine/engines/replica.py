# SPDX-License-Identifier: Apache-2.0
"""The part of a rollout replica that is the same for all engines."""

from typing import Any

import ray
from verl.single_controller.ray import RayClassWithInitArgs

from recipe.async_engine.actors.control import with_control
from recipe.async_engine.engines.gated_server import HELD
from recipe.async_engine.engines.reservation import Reservations, ReservedReplica
from recipe.async_engine.engines.weight_worker import RolloutWeightWorker


class GatedReplica(ReservedReplica):
    """A mixin that makes verl's replica of an engine use this package's servers and weight workers.

    A subclass sets ``server`` to the class of its servers, a subclass of `GatedServer`.
    """

    server: type

    def __init__(self, *args: Any, reservations: Reservations | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reservations = reservations
        self.server_class = with_control(self.server, HELD)

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        return RayClassWithInitArgs(
            cls=ray.remote(RolloutWeightWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )

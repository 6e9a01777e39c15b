# SPDX-License-Identifier: Apache-2.0
"""A rollout replica, which consists of one vLLM server on each of its nodes and of their weight workers.

Contract: a replica starts only on reserved accelerators, and its servers answer only with complete weights
(`recipe.async_engine.engines.vllm.server`). Shown by tests/integration/test_server_gate.py and test_reservation.py.
"""

import asyncio
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from recipe.async_engine.actors.control import with_control
from recipe.async_engine.engines.gated_server import HELD
from recipe.async_engine.engines.reservation import Reservations, ReservedReplica
from recipe.async_engine.engines.vllm.server import GatedVLLMHttpServer
from recipe.async_engine.engines.weight_worker import RolloutWeightWorker


class GatedVLLMReplica(ReservedReplica, vLLMReplica):
    """verl's vLLM replica with this package's :class:`GatedVLLMHttpServer` and `RolloutWeightWorker`."""

    def __init__(self, *args: Any, reservations: Reservations | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reservations = reservations
        self.server_class = with_control(GatedVLLMHttpServer, HELD)

    async def hold_requests(self) -> None:
        await asyncio.gather(*[server.hold_requests.remote() for server in self.servers])

    def get_ray_class_with_init_args(self) -> Any:
        from verl.single_controller.ray import RayClassWithInitArgs

        return RayClassWithInitArgs(
            cls=ray.remote(RolloutWeightWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )

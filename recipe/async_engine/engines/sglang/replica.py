# SPDX-License-Identifier: Apache-2.0
"""A rollout replica, which consists of one SGLang server on each of its nodes and of their weight workers.

Contract: a replica starts only on reserved accelerators, and its servers answer only with complete weights
(`recipe.async_engine.engines.gated_server`).
"""

from typing import Any

import ray
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from recipe.async_engine.actors.control import with_control
from recipe.async_engine.engines.gated_server import HELD
from recipe.async_engine.engines.reservation import Reservations, ReservedReplica
from recipe.async_engine.engines.sglang.server import GatedSGLangHttpServer
from recipe.async_engine.engines.weight_worker import RolloutWeightWorker


class GatedSGLangReplica(ReservedReplica, SGLangReplica):
    """verl's SGLang replica with this package's :class:`GatedSGLangHttpServer` and `RolloutWeightWorker`."""

    def __init__(self, *args: Any, reservations: Reservations | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reservations = reservations
        self.server_class = with_control(GatedSGLangHttpServer, HELD)

    def _get_server_name_prefix(self) -> str:
        return "sglang_"

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> None:
        await self.servers[0].abort_all_requests.remote(reset_prefix_cache, reject_request)

    async def hold_requests(self) -> None:
        await self.servers[0].hold_requests.remote()

    def get_ray_class_with_init_args(self) -> Any:
        from verl.single_controller.ray import RayClassWithInitArgs

        return RayClassWithInitArgs(
            cls=ray.remote(RolloutWeightWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )

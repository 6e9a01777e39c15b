# SPDX-License-Identifier: Apache-2.0
"""A rollout replica, which consists of one SGLang server on each of its nodes and of their weight workers.

Contract: a replica starts only on reserved accelerators, and its servers answer only with complete weights
(`recipe.async_engine.engines.gated_server`).
"""

from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from recipe.async_engine.engines.replica import GatedReplica
from recipe.async_engine.engines.sglang.server import GatedSGLangHttpServer


class GatedSGLangReplica(GatedReplica, SGLangReplica):
    """verl's SGLang replica with this package's :class:`GatedSGLangHttpServer` and `RolloutWeightWorker`."""

    server = GatedSGLangHttpServer

    def _get_server_name_prefix(self) -> str:
        return "sglang_"

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> None:
        await self.servers[0].abort_all_requests.remote(reset_prefix_cache, reject_request)

    async def hold_requests(self) -> None:
        await self.servers[0].hold_requests.remote()

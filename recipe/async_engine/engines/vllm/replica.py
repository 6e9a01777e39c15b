# SPDX-License-Identifier: Apache-2.0
"""A rollout replica, which consists of one vLLM server on each of its nodes and of the servers' weight workers.

Contract: a replica starts only on reserved accelerators, and its servers answer only with complete weights
(`recipe.async_engine.engines.gated_server`). Shown by tests/integration/test_server_gate.py and test_reservation.py.
"""

import asyncio

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from recipe.async_engine.engines.replica import GatedReplica
from recipe.async_engine.engines.vllm.server import GatedVLLMHttpServer


class GatedVLLMReplica(GatedReplica, vLLMReplica):
    """verl's vLLM replica with this package's :class:`GatedVLLMHttpServer` and `RolloutWeightWorker`."""

    server = GatedVLLMHttpServer

    async def hold_requests(self) -> None:
        await asyncio.gather(*[server.hold_requests.remote() for server in self.servers])

# SPDX-License-Identifier: Apache-2.0
"""The weight publisher where trainer and rollout share their accelerators.

Contract: generation happens between :meth:`begin_generation` and :meth:`pause` only. `pause` returns when every live
engine has given back its requests; requests on their way come back unanswered, so none waits at a server while the
trainer has its turn. :meth:`release` then frees the replicas' memory for the trainer, and :meth:`publish` takes it back
with new weights, each rank handing them to the engine beside it; the version is announced when all of them have
committed. A replica that died is out of routing for the rest of its turn; before the next publication
`recipe.partial_rollout.fleet` has it started again.

Shown by tests/integration/test_turn_publisher.py and tests/e2e/test_partial_rollout.py.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from recipe.async_engine.weights.publisher import (
    PING_TIMEOUT_S,
    ChecksumMismatch,
    NoReplicaLeft,
    PublishFailed,
    ReplicaRecord,
    WeightPublisher,
)


class TurnPublisher(WeightPublisher):
    """See the module's contract."""

    def begin_generation(self) -> None:
        """Let the replicas, which hold a complete version, answer requests.

        Raises:
            NoReplicaLeft: none of them is alive.
        """
        asyncio.run(self._begin())

    async def _begin(self) -> None:
        await self._each("resume", self._candidates(), self._open)
        await self._route(self._candidates())
        await self._unroute_dead()
        if not self.live_replicas:
            raise NoReplicaLeft(f"no rollout replica is alive: {self._errors()}")

    def pause(self) -> float:
        """Interrupt generation; returns the seconds until no engine generates."""
        began = time.monotonic()
        asyncio.run(self._each("stop generating", self._candidates(), self._stop_generating))
        return time.monotonic() - began

    def release(self) -> None:
        """Free the memory of the replicas' engines, which hold no weights then."""
        asyncio.run(self._each("free its memory", self._candidates(), self._sleep))

    def find_dead(self) -> str:
        """Ask each replica whether it and its engine are alive; returns what is wrong with those that are not."""
        asyncio.run(self._find_dead())
        return self._errors()

    async def _find_dead(self) -> None:
        await self._each("answer", self._candidates(), self._check_engine, PING_TIMEOUT_S)
        await self._unroute_dead()

    @staticmethod
    async def _check_engine(record: ReplicaRecord) -> None:
        await asyncio.gather(*[server.check_engine.remote() for server in record.replica.servers])

    @staticmethod
    async def _open(record: ReplicaRecord) -> None:
        # The publication has taken the engine's memory back, its cache included.
        await record.replica.resume_generation()

    @staticmethod
    async def _stop_generating(record: ReplicaRecord) -> None:
        await record.replica.abort_all_requests(reject_request=True)

    @staticmethod
    async def _sleep(record: ReplicaRecord) -> None:
        await record.replica.sleep()

    async def _publish(self, version: int, announce: Callable[[], Any]) -> dict[str, float]:
        outcomes = await self._outcomes(self.actor_wg.update_weights(global_steps=version, mode=self.backend))
        error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if error is not None:
            raise PublishFailed(f"version {version} did not reach every replica: {error}") from error
        if len(set(outcomes)) > 1:
            raise ChecksumMismatch(f"trainer ranks loaded different weights of version {version}: {outcomes}")
        self.checksum = outcomes[0]
        announce()
        return {}

    async def _unroute_dead(self) -> None:
        """Take engines that died since the last turn out of routing; their requests have failed or will."""
        lost = [record for record in self._records if record.dead and record.routed]
        for record in lost:
            record.routed = False
        if lost:
            servers = [record.server_id for record in lost]
            await asyncio.wait_for(self.load_balancer.remove_servers.remote(servers), PING_TIMEOUT_S)

# SPDX-License-Identifier: Apache-2.0
"""verl's load balancer, which is told of ended requests together with the next one, in one call instead of two.

Contract: routing is verl's (sticky by conversation, else the fewest requests under way), but a conversation leaves a
server that has failed a request of it, if there is another one. A client that asks for a server says which servers'
requests have ended meanwhile, and which one has failed, in fields that this load balancer declares as verl has it; a
count is late by `SAY_ENDED_S` at most. Another load balancer, the user's, is told of each end at once, as verl does.
Shown by tests/integration/test_client.py and test_control.py.
"""

from collections.abc import Sequence

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

ENDED, AVOIDED = "ended", "avoided"
SAY_ENDED_S = 0.02
HELD = ("acquire_server", "release_server", "release_servers")
"""What each request asks of the load balancer."""


class CountingBalancer(GlobalRequestLoadBalancer):
    """See the module's contract."""

    def acquire_server(
        self, request_id: str, ended: Sequence[str] = (), avoided: str | None = None
    ) -> tuple[str, ray.actor.ActorHandle]:
        """As verl's, after one request of each server named in ``ended`` has ended; another one than ``avoided``."""
        self.release_servers(ended)
        if avoided is not None and self._request_id_to_server.get(request_id) == avoided:
            others = [server_id for server_id in self._inflight_requests if server_id != avoided]
            if others:
                self._request_id_to_server[request_id] = min(others, key=self._inflight_requests.__getitem__)
        return super().acquire_server(request_id)

    def release_servers(self, ended: Sequence[str]) -> None:
        """One request of each of these servers has ended."""
        for server_id in ended:
            self.release_server(server_id)

    def require_acquire_fields(self) -> list[str]:
        return [ENDED, AVOIDED]

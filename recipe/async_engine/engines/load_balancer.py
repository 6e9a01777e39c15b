# SPDX-License-Identifier: Apache-2.0
"""verl's load balancer, except that a client reports ended requests in its next call instead of in a call for each.

Contract: routing is verl's: a conversation stays with its server, and a new one goes to the server with the fewest
requests in progress. In addition a conversation leaves a server that has failed one of its requests, if there is
another server. When a client asks for a server, it also reports the servers whose requests have ended since its last
call, and the server that failed, in fields that this load balancer declares through verl's interface. Such a report is
late by at most `SAY_ENDED_S` seconds. To a user's own load balancer each end is reported at once, as in verl. Shown by
tests/integration/test_client.py and test_control.py.
"""

from collections.abc import Sequence

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

ENDED, AVOIDED = "ended", "avoided"
SAY_ENDED_S = 0.02
HELD = ("acquire_server", "release_server", "release_servers")
"""The load balancer's methods that each request calls."""


class CountingBalancer(GlobalRequestLoadBalancer):
    """verl's load balancer, with reports of ended requests in batches."""

    def acquire_server(
        self, request_id: str, ended: Sequence[str] = (), avoided: str | None = None
    ) -> tuple[str, ray.actor.ActorHandle]:
        """Return a server, not ``avoided`` if possible; ``ended`` names a server once per request that it has ended."""
        self.release_servers(ended)
        if avoided is not None and self._request_id_to_server.get(request_id) == avoided:
            others = [server_id for server_id in self._inflight_requests if server_id != avoided]
            if others:
                self._request_id_to_server[request_id] = min(others, key=self._inflight_requests.__getitem__)
        return super().acquire_server(request_id)

    def release_servers(self, ended: Sequence[str]) -> None:
        """Record ended requests; ``ended`` names a server once for each of its requests that has ended."""
        for server_id in ended:
            self.release_server(server_id)

    def require_acquire_fields(self) -> list[str]:
        return [ENDED, AVOIDED]

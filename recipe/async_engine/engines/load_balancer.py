# SPDX-License-Identifier: Apache-2.0
"""A load balancer like verl's that learns of ended requests together with the next one, in one call instead of two.

Contract: routing is verl's (sticky by conversation, else to the server with the fewest requests in progress), except
that a conversation leaves a server that has failed one of its requests, if there is another server. A client that asks
for a server also reports which servers' requests have ended since and which server failed, in fields that this load
balancer declares through verl's interface; a count is late by at most `SAY_ENDED_S`. A user's own load balancer is told
of each end at once, as in verl. Shown by tests/integration/test_client.py and test_control.py.
"""

from collections.abc import Sequence

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

ENDED, AVOIDED = "ended", "avoided"
SAY_ENDED_S = 0.02
HELD = ("acquire_server", "release_server", "release_servers")
"""The load balancer's methods that each request calls."""


class CountingBalancer(GlobalRequestLoadBalancer):
    """verl's load balancer with reports of ended requests, as the module's contract describes."""

    def acquire_server(
        self, request_id: str, ended: Sequence[str] = (), avoided: str | None = None
    ) -> tuple[str, ray.actor.ActorHandle]:
        """Return a server like verl, but not ``avoided`` if possible; one request has ended for each of ``ended``."""
        self.release_servers(ended)
        if avoided is not None and self._request_id_to_server.get(request_id) == avoided:
            others = [server_id for server_id in self._inflight_requests if server_id != avoided]
            if others:
                self._request_id_to_server[request_id] = min(others, key=self._inflight_requests.__getitem__)
        return super().acquire_server(request_id)

    def release_servers(self, ended: Sequence[str]) -> None:
        """Record that one request has ended for each server named."""
        for server_id in ended:
            self.release_server(server_id)

    def require_acquire_fields(self) -> list[str]:
        return [ENDED, AVOIDED]

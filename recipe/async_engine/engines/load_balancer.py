# SPDX-License-Identifier: Apache-2.0
"""verl's load balancer, to which clients report ended requests together with their next request.

Contract: as in verl, all requests of a conversation go to one server, and a new conversation goes to the server with
the fewest requests in progress. In addition, a conversation moves to another server, if there is one, after its server
has failed one of its requests. When a client asks for a server, it also reports at which servers requests have
ended since its last call, and which server has failed the present request. These reports are arguments of
`acquire_server` that `require_acquire_fields` declares. A client reports the end of a request after at most
`SAY_ENDED_S` seconds. A user's own load balancer instead gets a call for each ended request, as in verl. Shown by
tests/integration/test_client.py and test_control.py.
"""

from collections.abc import Sequence

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

ENDED, AVOIDED = "ended", "avoided"
SAY_ENDED_S = 0.02
HELD = ("acquire_server", "release_server", "release_servers")
"""The methods of the load balancer that clients call for each request."""


class CountingBalancer(GlobalRequestLoadBalancer):
    """verl's load balancer, to which a client can report several ended requests in one call."""

    def acquire_server(
        self, request_id: str, ended: Sequence[str] = (), avoided: str | None = None
    ) -> tuple[str, ray.actor.ActorHandle]:
        """Return id and handle of a server for a request, if possible not of the server ``avoided``.

        ``ended`` has a server id for each request that has ended since the client's last call.
        """
        self.release_servers(ended)
        if avoided is not None and self._request_id_to_server.get(request_id) == avoided:
            others = [server_id for server_id in self._inflight_requests if server_id != avoided]
            if others:
                self._request_id_to_server[request_id] = min(others, key=self._inflight_requests.__getitem__)
        return super().acquire_server(request_id)

    def release_servers(self, ended: Sequence[str]) -> None:
        """Record that requests have ended. ``ended`` has the id of the server of each request."""
        for server_id in ended:
            self.release_server(server_id)

    def require_acquire_fields(self) -> list[str]:
        return [ENDED, AVOIDED]

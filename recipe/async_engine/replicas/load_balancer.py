# SPDX-License-Identifier: Apache-2.0
"""verl's load balancer, which is told of ended requests together with the next one, in one call instead of two.

Contract: routing is verl's (sticky by conversation, else the fewest requests under way). A client that asks for a
server says which servers' requests have ended meanwhile, in a field that this load balancer declares as verl has it; a
count is late by `SAY_ENDED_S` at most. Another load balancer, the user's, is told of each end at once, as verl does.
Shown by tests/integration/test_client.py and test_control.py.
"""

from collections.abc import Sequence

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

ENDED = "ended"
SAY_ENDED_S = 0.02
HELD = ("acquire_server", "release_server", "release_servers")
"""What each request asks of the load balancer."""


class CountingBalancer(GlobalRequestLoadBalancer):
    """See the module's contract."""

    def acquire_server(self, request_id: str, ended: Sequence[str] = ()) -> tuple[str, ray.actor.ActorHandle]:
        """As verl's, after one request of each server named in ``ended`` has ended."""
        self.release_servers(ended)
        return super().acquire_server(request_id)

    def release_servers(self, ended: Sequence[str]) -> None:
        """One request of each of these servers has ended."""
        for server_id in ended:
            self.release_server(server_id)

    def require_acquire_fields(self) -> list[str]:
        return [ENDED]

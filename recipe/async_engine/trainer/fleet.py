# SPDX-License-Identifier: Apache-2.0
"""Everything that gets weights in a run: rollout replicas and log-prob servers, and what takes a lost one's place.

Contract: a publication goes to whatever is alive, with what was started in a lost one's place since the last one; what
it finds dead is replaced from then on, as far as the budget goes. Agent-loop workers ask the log-prob servers that hold
a version. Where trainer and rollout share their accelerators, `recipe.partial_rollout.fleet` takes its place.

Shown by tests/integration/test_replacement.py and tests/e2e/test_replacement.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.workers.rollout.replica import RolloutReplica

from recipe.async_engine.actors.replacement import Replacements
from recipe.async_engine.log_prob_servers.meter import ServerMeter
from recipe.async_engine.weights.publisher import StagedVersion, WeightPublisher
from recipe.async_engine.weights.replica_set import generates

Handles = dict[str, Any]


class Fleet:
    """See the module's contract. The trainer's thread calls it.

    Args:
        publisher: hands weights to whatever it knows.
        replacements: starts replicas; None: nothing is replaced.
        start_replica: another rollout replica, up and without weights.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        replacements: Replacements | None = None,
        start_replica: Callable[[], RolloutReplica] | None = None,
    ) -> None:
        self.publisher = publisher
        self._replacements = replacements
        self._start_replica = start_replica
        self._start_server: Callable[[], RolloutReplica] | None = None
        self._tell: Callable[[Handles], None] | None = None
        self._told: Handles = {}
        self._meter = ServerMeter()

    @property
    def servers(self) -> list[RolloutReplica]:
        """The log-prob servers that the publisher has."""
        return [replica for replica in self.publisher.replicas if not generates(replica)]

    def use_servers(
        self,
        servers: list[RolloutReplica],
        tell: Callable[[Handles], None],
        start: Callable[[], RolloutReplica] | None = None,
    ) -> None:
        """Have log-prob servers, which get weights from now on; ``start`` starts another one.

        ``tell`` hands agent-loop workers the servers to ask, actor handles by name.
        """
        self._tell, self._start_server = tell, start
        self.publisher.add_replicas(servers)
        self._tell_agents()

    def publish(self, version: int) -> dict[str, float]:
        """Snapshot, stage, swap and resume; see the four."""
        self.snapshot(version)
        staged = self.stage(version)
        self.swap(staged)
        return self.resume(staged)

    def snapshot(self, version: int) -> None:
        """See :meth:`WeightPublisher.snapshot`."""
        self.publisher.snapshot(version)

    def stage(self, version: int) -> StagedVersion:
        """See :meth:`WeightPublisher.stage`; replicas that have started since the last sync take part."""
        if self._replacements is not None:
            self.publisher.add_replicas(self._replacements.take())
        return self.publisher.stage(version)

    def swap(self, staged: StagedVersion) -> None:
        """See :meth:`WeightPublisher.swap`."""
        self.publisher.swap(staged)

    def resume(self, staged: StagedVersion) -> dict[str, float]:
        """See :meth:`WeightPublisher.resume`; replacements of what was lost begin to start."""
        metrics = self.publisher.resume(staged)
        for lost in self.publisher.take_lost() if self._replacements is not None else []:
            self._replace_lost(lost)
        self._tell_agents()
        return metrics

    def metrics(self, version: int) -> dict[str, float]:
        """What the log-prob servers did since the last call, and the count of replacements begun."""
        served = {} if self._tell is None else self._meter.read(self._told, version)
        return {"fully_async/count/restarts": self.restarts, **served}

    @property
    def restarts(self) -> int:
        """Replacements begun so far."""
        return 0 if self._replacements is None else self._replacements.begun

    def _tell_agents(self) -> None:
        """Say which log-prob servers the publisher has now, if they are others than before."""
        handles = {server.server_address: server.server_handle for server in self.servers}
        if self._tell is not None and handles != self._told:
            self._told = handles
            self._tell(handles)

    def _replace_lost(self, lost: RolloutReplica) -> None:
        if generates(lost):
            start, what = self._start_replica, "a rollout replica"
        else:
            start, what = self._start_server, "a log-prob server"
        if start is not None and self._replacements is not None:
            self._replacements.begin(f"{what} in the place of number {lost.replica_rank}", lost, start)

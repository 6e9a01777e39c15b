# SPDX-License-Identifier: Apache-2.0
"""The weight publisher: transfers each weights version to the rollout replicas and the log-prob servers.

Contract:

* With ``async_training.weights.publish=inline`` the trainer waits for the whole publication. Otherwise it waits only
  for :meth:`WeightPublisher.snapshot`, which copies its weights, and trains on while the copy is sent.
* Replicas stage a version next to the live weights. Generation pauses for the swap only when every live replica has
  staged the complete version. Until then, and if the transfer fails, the replicas generate with the old version. When
  the live replicas have swapped, generation resumes on the replicas that hold the new version.
* A replica that died, or did not load the version, gets no requests until it loads a later version; the other replicas
  continue without it. If weights are loaded in place (``async_training.weights.staging=none``), generation pauses for
  the whole transfer. After a broken transfer all replicas load again, because any of them may have incomplete weights.
* The members of a transfer are the trainer's ranks and the receivers. Every step has a deadline
  (``async_training.timeouts.weight_sync``); stock verl waits for ever when a receiver dies
  (checkpoint_engine/base.py:553). A collective waits for every member, so as soon as one member fails, the publisher
  makes all members leave their group, by calling ``reset`` on checkpoint engines that have this method. After each
  transfer, even a failed one, it calls ``finalize`` on all engines.
* A receiver whose checksum differs from the trainer's has failed to load. A log-prob server with such weights is told
  to refuse requests until a later load succeeds. The failure of a log-prob server never ends the run.
* A member that fails repeatedly does not block the others: after the second attempt they load without it.
* Receivers that a publication finds dead are replaced while the run goes on, within the restart budget. A replacement
  takes part in the first publication after its start. When the set of log-prob servers changes, the agent-loop workers
  get the handles of the new set.
* If no replica is left, :class:`NoReplicaLeft` ends the run with the cause. A publisher that never had a replica,
  because all replicas are hybrid, sends nothing.

Shown by tests/integration/test_publisher.py and, with replicas killed in real syncs, by test_nccl_engine.py in the same
folder, tests/e2e/test_faults.py and test_replacement.py.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineManager, _worker_cls
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutReplica

from recipe.async_engine.actors.replacement import Replacements
from recipe.async_engine.config.sections import Weights
from recipe.async_engine.core.deadlines import PING_S
from recipe.async_engine.core.errors import RecipeError, WeightLoadError, WeightStreamError
from recipe.async_engine.weights.replica_set import (
    ReplicaRecord,
    ReplicaSet,
    generates,
    ping,
    plain_cause,
)
from recipe.async_engine.weights.snapshot import Wire, last_parts
from recipe.async_engine.weights.transfer_group import (
    ChecksumMismatch,
    TransferGroup,
    evaluated,
    failed_by_itself,
    outcomes,
)

logger = logging.getLogger(__name__)

Handles = dict[str, Any]
Start = Callable[[], RolloutReplica]

ATTEMPTS = 3
"""Largest number of attempts at a transfer. The third attempt leaves out the members that made the second one fail."""


class NoReplicaLeft(RecipeError):
    """No rollout replica has the current weights. ``__cause__`` is the error of one of the replicas."""


class PublishFailed(RecipeError):
    """The trainer could not copy its weights, or could not send them in any attempt."""


@dataclass
class StagedVersion:
    """The state of one version's publication, from `WeightPublisher.stage` to `WeightPublisher.resume`."""

    version: int
    seconds: float = 0.0
    """Seconds that the publisher's calls for this version have taken so far."""
    paused_at: float | None = None
    """Time of `time.monotonic` at which generation paused, or None if it has not paused yet."""
    holders: list[ReplicaRecord] = field(default_factory=list)
    """Replicas and log-prob servers that have the version, either staged or live."""
    sender: dict[str, float] = field(default_factory=dict)
    """Metrics that the sending rank reported."""


class WeightPublisher(CheckpointEngineManager):
    """verl's checkpoint-engine manager with deadlines, which also keeps track of the replicas that have a version."""

    def __init__(
        self,
        config: CheckpointEngineConfig,
        actor_wg: RayWorkerGroup,
        replicas: list[RolloutReplica],
        load_balancer: ray.actor.ActorHandle,
        timeout_s: float,
        weights: Weights,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """Create a publisher that sends weights to ``replicas``.

        ``dtype`` is the narrowest dtype in which floating-point weights can be sent without a loss at any receiver.
        ``timeout_s`` limits each call to a replica.
        """
        super().__init__(config, actor_wg, replicas)
        self.weights = weights
        """The settings ``async_training.weights``. Settings that the user left null have been replaced by defaults."""
        self._dtype = dtype
        self._wire: Wire | None = None
        self.known = ReplicaSet(replicas, load_balancer, timeout_s)
        self.seconds = 0.0
        self.checksum: str | None = None
        self.attempts = ATTEMPTS
        self._replacements: Replacements | None = None
        self._start_replica: Start | None = None
        self._start_server: Start | None = None
        self._tell: Callable[[Handles], None] | None = None
        self.told: Handles = {}
        """The handles of the log-prob servers that were last passed to the agent-loop workers, by server name."""

    @property
    def _beside(self) -> bool:
        return self.weights.publish == "beside"

    @property
    def _in_place(self) -> bool:
        return self.weights.staging == "none"

    def add_replicas(self, replicas: list[RolloutReplica]) -> None:
        """Include these replicas or log-prob servers from the next weight sync on."""
        super().add_replicas(replicas)
        self.known.records += [ReplicaRecord(replica) for replica in replicas]

    def replace_lost(self, replacements: Replacements, start_replica: Start) -> None:
        """From now on, make ``replacements`` replace each lost replica by a replica that ``start_replica`` returns."""
        self._replacements, self._start_replica = replacements, start_replica

    def use_servers(
        self, servers: list[RolloutReplica], tell: Callable[[Handles], None], start: Start | None = None
    ) -> None:
        """Send weights to these log-prob servers too; ``start`` starts a replacement for a lost server.

        ``tell`` passes the handles of the present servers to the agent-loop workers, now and after each change.
        """
        self._tell, self._start_server = tell, start
        self.add_replicas(servers)
        self._tell_agents()

    @property
    def servers(self) -> list[RolloutReplica]:
        return [record.replica for record in self.known.records if not record.generates]

    def take_lost(self) -> list[RolloutReplica]:
        """Remove and return the replicas and servers that died."""
        lost = [record.replica for record in self.known.records if record.dead]
        self.known.records = [record for record in self.known.records if not record.dead]
        self.remove_replicas(lost)
        return lost

    @property
    def live_replicas(self) -> int:
        """Number of replicas that get requests from the load balancer. All of them have the last published version."""
        return sum(record.routed for record in self.known.records)

    @property
    def serving(self) -> list[ray.actor.ActorHandle]:
        """The handles of the rollout servers that get requests from the load balancer, one server for each replica."""
        return [record.replica.server_handle for record in self.known.records if record.routed]

    def publish(self, version: int) -> dict[str, float]:
        """Perform a whole publication: snapshot, stage, swap and resume; return metrics."""
        self.snapshot(version)
        staged = self.stage(version)
        self.swap(staged)
        return self.resume(staged)

    def snapshot(self, version: int) -> None:
        """Make the trainer copy its weights, so that it can train while they are sent.

        If training waits for the transfer, nothing is copied.

        Raises:
            PublishFailed: the trainer could not copy its weights.
        """
        if not self._beside:
            return
        try:
            if self._wire is None:
                self._wire = asyncio.run(self._agree_on_dtypes())
            asyncio.run(self._copy(version, self._wire))
        except Exception as error:
            raise PublishFailed(f"the trainer could not copy version {version}: {plain_cause(error)}") from error

    def stage(self, version: int) -> StagedVersion:
        """Stage the version on the replicas, which continue to generate with their live weights.

        Replicas that have started since the last publication are added first. If weights are loaded in place, nothing
        is staged, and `swap` loads them.

        Raises:
            NoReplicaLeft: no replica has loaded the version.
            PublishFailed: the trainer could not send.
        """
        if self._replacements is not None:
            self.add_replicas(self._replacements.take())
        staged = StagedVersion(version)
        if not self._in_place:
            self._timed(staged, self._transfer(staged))
        return staged

    def swap(self, staged: StagedVersion) -> None:
        """Pause generation until `resume`, and make the staged weights the live ones.

        Raises:
            NoReplicaLeft: no replica holds the version.
            PublishFailed: weights are loaded in place, and the trainer could not send.
        """
        self._timed(staged, self._swap(staged))

    def resume(self, staged: StagedVersion) -> dict[str, float]:
        """Resume generation on the replicas that hold the version, and begin to replace lost ones; return metrics.

        Raises:
            NoReplicaLeft: no replica resumed.
        """
        self._timed(staged, self._resume(staged))
        self.seconds += staged.seconds
        metrics = {**staged.sender, "fully_async/weight_sync/seconds": staged.seconds}
        if staged.paused_at is not None:
            metrics["fully_async/weight_sync/generation_paused_seconds"] = time.monotonic() - staged.paused_at
        if self._replacements is not None:
            self._replace(self._replacements)
        self._tell_agents()
        return metrics

    def _replace(self, replacements: Replacements) -> None:
        for lost in self.take_lost():
            start, what = self._start_server, "a log-prob server"
            if generates(lost):
                start, what = self._start_replica, "a rollout replica"
            if start is not None:
                replacements.begin(f"{what} in the place of number {lost.replica_rank}", lost, start)

    def _tell_agents(self) -> None:
        handles = {server.server_address: server.server_handle for server in self.servers}
        if self._tell is not None and handles != self.told:
            self.told = handles
            self._tell(handles)

    async def _copy(self, version: int, wire: Wire) -> None:
        await self._all(self.actor_wg.snapshot_weights(version, wire))

    async def _agree_on_dtypes(self) -> Wire:
        if self._in_place:
            # Convert no parameter to a narrower dtype: only engines with staging areas can say which of their
            # parameters have a wider dtype than the others.
            return Wire()
        servers = [record.replica.server_handle for record in self.known.present if record.generates]
        answers = await self._all([server.wide_parameters.remote() for server in servers])
        return Wire(self._dtype, frozenset(last_parts(name) for names in answers for name in names))

    @staticmethod
    def _timed(staged: StagedVersion, work: Coroutine[Any, Any, None]) -> None:
        began = time.monotonic()
        try:
            asyncio.run(work)
        finally:
            staged.seconds += time.monotonic() - began

    async def _transfer(self, staged: StagedVersion) -> None:
        """Transfer the version to the replicas and log-prob servers, and record in ``staged`` which ones loaded it."""
        version = staged.version
        # Find dead receivers first, because a dead member makes a transfer fail for all.
        living = [record for record in self.known.records if not record.dead]
        servers = [record for record in living if not record.generates]
        await asyncio.gather(
            self.known.each("answer", servers, ping, PING_S, or_absent=True),
            self.known.each("answer", [record for record in living if record.generates], ping),
        )
        committed = await self._load_with_retries(staged)
        staged.holders = [record for record in committed if not record.dead]
        wrong = [record for record in self.known.present if isinstance(record.error, ChecksumMismatch)]
        await self.known.each(
            "refuse its weights",
            [record for record in wrong if not record.generates],
            lambda record: record.replica.server_handle.refuse.remote(version, str(record.error)),
        )
        self._check_left(staged.holders, f"no rollout replica holds version {version}")

    async def _swap(self, staged: StagedVersion) -> None:
        staged.paused_at = time.monotonic()
        await self.known.each("pause", self.known.present, lambda record: self._pause(record, record in staged.holders))
        if self._in_place:
            await self._transfer(staged)
        else:
            checksum = self.checksum
            await self.known.each(
                "swap its weights",
                [record for record in staged.holders if record.generates and not record.dead],
                lambda record: record.replica.server_handle.swap.remote(staged.version, checksum),
            )
        staged.holders = [record for record in staged.holders if not record.dead]
        await self._unroute([record for record in self.known.records if record not in staged.holders])
        self._check_left(staged.holders, f"no rollout replica holds version {staged.version}")

    async def _load_with_retries(self, staged: StagedVersion) -> list[ReplicaRecord]:
        """Transfer the version, in several attempts if a rollout replica does not load it.

        Return the receivers (replicas and log-prob servers) that loaded the version in the last attempt.
        Raises:
            PublishFailed: the trainer itself failed repeatedly.
        """
        version = staged.version
        committed: list[ReplicaRecord] = []
        refused: list[ReplicaRecord] = []
        for attempt in range(1, self.attempts + 1):
            candidates = [record for record in self.known.present if record not in refused]
            if not candidates:
                break
            committed, staged.sender, trainer_error = await self._load(candidates, version)
            if len(committed) < len(candidates):
                logger.error("weight sync of version %d, attempt %d: %s", version, attempt, self.known.errors)
            if all(record in committed for record in candidates if record.generates):
                break
            await self.known.each("answer", self.known.present, ping, PING_S)
            if attempt > 1 and self.known.present and self._is_the_cause(trainer_error):
                raise PublishFailed(f"the trainer could not send version {version}: {trainer_error}") from trainer_error
            # One failing member makes a collective transfer fail for all members, so leave it out of a later attempt.
            failed = [record for record in candidates if record not in committed and not record.dead]
            own = [record for record in failed if failed_by_itself(record, trainer_error)]
            if attempt > 1 and (own == failed or len(own) == len(candidates)):
                break
            refused = own if attempt > 1 else [record for record in own if isinstance(record.error, WeightLoadError)]
            if len(refused) == len(candidates):
                refused = []
        return committed

    def _check_left(self, records: list[ReplicaRecord], what: str) -> None:
        """Raise NoReplicaLeft with the message ``what`` if no live rollout replica is among ``records``."""
        if self.known.records and not any(record.generates and not record.dead for record in records):
            errors = (record.error for record in self.known.records if record.error is not None)
            raise NoReplicaLeft(f"{what}: {self.known.errors}") from next(errors, None)

    def _is_the_cause(self, trainer_error: BaseException | None) -> bool:
        """Return whether the trainer failed for a reason of its own, and not because a receiver left the transfer."""
        if trainer_error is None or any(failed_by_itself(record, trainer_error) for record in self.known.present):
            return False
        its_own = not isinstance(plain_cause(trainer_error), WeightStreamError)
        return its_own or all(record.error is trainer_error for record in self.known.present)

    async def _pause(self, record: ReplicaRecord, is_holder: bool) -> None:
        if is_holder and self.weights.at_swap == "keep":
            await record.replica.hold_requests()
            return
        await record.replica.abort_all_requests()
        if self._in_place:
            await record.replica.release_kv_cache()

    async def _load(
        self, records: list[ReplicaRecord], version: int
    ) -> tuple[list[ReplicaRecord], dict[str, float], BaseException | None]:
        """Try once to transfer ``version`` to the replicas and servers of all ``records``.

        Return the records of those that loaded the version, the trainer's metrics, and the trainer's error or None.
        """
        handles = [worker for record in records for worker in record.replica.workers]
        rollout = RayWorkerGroup(worker_handles=handles, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))
        group = TransferGroup(self.actor_wg, rollout, self.backend_cls, self._answer_s)
        try:
            results: list[Any] = await group.connect()
            if not results:
                if self._beside:
                    sent = self.actor_wg.send_snapshot(version)
                else:
                    sent = self.actor_wg.update_weights(global_steps=version, mode=self.backend)
                how = "update_weights" if self._in_place else "stage_weights"
                received = [getattr(worker, how).remote(version) for worker in handles]
                results = await group.transferred([*sent, *received])
        except Exception as error:  # A later ping finds out which replicas are dead.
            for record in records:
                record.error = error
            return [], {}, error
        finally:
            await group.tell("finalize")
        committed, metrics, checksum, trainer_error = evaluated(records, version, results, self.actor_wg.world_size)
        if committed:
            self.checksum = checksum
        return committed, metrics, trainer_error

    @property
    def _answer_s(self) -> float:
        # This deadline is longer than the transfer's own, so that a late transfer is reported with its own error.
        return self.known.timeout_s + PING_S

    async def outcomes(self, references: list[Any]) -> list[Any]:
        """Return, for each Ray reference, its value, its exception or, after `_answer_s` seconds, a TimeoutError."""
        return await outcomes(references, self._answer_s)

    async def _all(self, references: list[Any]) -> list[Any]:
        found = await self.outcomes(references)
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
        return found

    async def _unroute(self, records: list[ReplicaRecord]) -> None:
        """Remove replicas from the load balancer, then abort the requests that wait at their servers.

        Requests wait at a server if only a weight worker of the replica died: then the server is alive and paused. If
        the server itself died, its requests have failed already.
        """
        leaving = await self.known.unroute(records)
        await self.known.each(
            "leave routing", leaving, lambda record: record.replica.server_handle.leave_routing.remote()
        )

    async def _resume(self, staged: StagedVersion) -> None:
        async def resume(record: ReplicaRecord) -> None:
            if self._in_place:
                await record.replica.resume_kv_cache()
            await record.replica.resume_generation()

        records = staged.holders
        await self.known.each("resume", records, resume)
        await self._unroute([record for record in records if record.dead])
        await self.known.route([record for record in records if not record.dead])
        self._check_left(records, f"no rollout replica resumed with version {staged.version}")

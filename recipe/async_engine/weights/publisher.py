# SPDX-License-Identifier: Apache-2.0
"""The weight publisher: brings one version of the weights to rollout replicas and log-prob servers alike.

Contract:

* The trainer waits for the whole (``async_training.weights.publish=inline``), or for :meth:`WeightPublisher.snapshot`
  alone: what is sent then is a copy of its weights.
* A version is staged beside the weights that generate. Generation pauses only when every live replica has it whole, for
  the swap; until then, and if the transfer fails, the old version answers. It is announced when the live replicas have
  swapped; generation resumes after that, and only on replicas that hold it.
* A replica that died, or did not take the version, is out of routing until a later one succeeds; the others go on
  without it. Where weights are loaded in place (``async_training.weights.staging=none``), generation pauses for the
  whole transfer, and after a broken one, which may have left torn weights everywhere, all load again.
* Every step has a deadline (``async_training.timeouts.weight_sync``); stock verl waits for ever when a receiver dies
  (checkpoint_engine/base.py:553). As soon as one member fails, engines that can leave their group (``reset``) are told
  to, since a collective waits for every member; all are finalized after each transfer, failed ones too.
* Who loaded other weights than the trainer sent, by their checksums, has failed to load. A log-prob server that has
  failed is told so and scores nothing before a later load; it never ends the run.
* One that fails again and again costs the others nothing: after the second attempt they load without it.
* What a publication finds dead is replaced from then on, beside the run and as far as the budget goes; the newcomer
  takes part in the next publication. Agent-loop workers are told which log-prob servers there are.
* If no replica is left, :class:`NoReplicaLeft` ends the job with the cause.

Shown by tests/integration/test_publisher.py and, with replicas killed in real syncs, by test_nccl_engine.py there and
tests/e2e/test_faults.py and test_replacement.py.
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
from recipe.async_engine.core.errors import RecipeError, WeightLoadError, WeightStreamError
from recipe.async_engine.weights.replica_set import (
    PING_TIMEOUT_S,
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
    failed_by_itself,
    judged,
    outcomes,
)

logger = logging.getLogger(__name__)

Handles = dict[str, Any]
Start = Callable[[], RolloutReplica]

ATTEMPTS = 3
"""Of which the last is made only where one member's fault has kept the others from their weights twice."""


class NoReplicaLeft(RecipeError):
    """No rollout replica holds the current weights; the cause is chained."""


class PublishFailed(RecipeError):
    """The trainer's side of a weight sync failed, on every attempt."""


@dataclass
class StagedVersion:
    """A version on its way to the replicas, from :meth:`WeightPublisher.stage` to :meth:`WeightPublisher.resume`."""

    version: int
    seconds: float = 0.0
    """What the calls have taken so far."""
    paused_at: float | None = None
    """When generation paused (monotonic clock); None where it does not go on with the version."""
    holders: list[ReplicaRecord] = field(default_factory=list)
    """Replicas that have the version, beside their live weights or in their place."""
    sender: dict[str, float] = field(default_factory=dict)
    """Metrics of the sender."""


class WeightPublisher(CheckpointEngineManager):
    """verl's checkpoint-engine manager with deadlines and a notion of which replica holds what."""

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
        """``dtype``: the narrowest for floating-point weights in which no receiver loses anything."""
        super().__init__(config, actor_wg, replicas)
        self.weights = weights
        """How the next version gets into the replicas; nothing in it is null."""
        self._dtype = dtype
        self._wire: Wire | None = None
        self.known = ReplicaSet(replicas, load_balancer, timeout_s)
        self.seconds = 0.0
        self.checksum: str | None = None
        self.attempts = ATTEMPTS
        """Of a transfer."""
        self._replacements: Replacements | None = None
        self._start_replica: Start | None = None
        self._start_server: Start | None = None
        self._tell: Callable[[Handles], None] | None = None
        self.told: Handles = {}
        """The log-prob servers that agent-loop workers were told of last: actor handles by name."""

    @property
    def _beside(self) -> bool:
        return self.weights.publish == "beside"

    @property
    def _in_place(self) -> bool:
        return self.weights.staging == "none"

    def add_replicas(self, replicas: list[RolloutReplica]) -> None:
        """Replicas that take part from the next sync on; see verl's method of this name."""
        super().add_replicas(replicas)
        self.known.records += [ReplicaRecord(replica) for replica in replicas]

    def replace_lost(self, replacements: Replacements, start_replica: Start) -> None:
        """Have ``replacements`` start another replica, up and without weights, for each that is lost from now on."""
        self._replacements, self._start_replica = replacements, start_replica

    def use_servers(
        self, servers: list[RolloutReplica], tell: Callable[[Handles], None], start: Start | None = None
    ) -> None:
        """Give log-prob servers weights from now on; ``start`` starts another one.

        ``tell`` hands agent-loop workers the servers to ask, now and whenever these are others.
        """
        self._tell, self._start_server = tell, start
        self.add_replicas(servers)
        self._tell_agents()

    @property
    def servers(self) -> list[RolloutReplica]:
        """The log-prob servers that get weights."""
        return [record.replica for record in self.known.records if not record.generates]

    @property
    def restarts(self) -> int:
        """Replacements begun so far."""
        return 0 if self._replacements is None else self._replacements.begun

    def take_lost(self) -> list[RolloutReplica]:
        """Those that died; they are forgotten here, so each is given once."""
        lost = [record.replica for record in self.known.records if record.dead]
        self.known.records = [record for record in self.known.records if not record.dead]
        self.remove_replicas(lost)
        return lost

    @property
    def live_replicas(self) -> int:
        """Replicas in routing: each holds the version that was announced last."""
        return sum(record.routed for record in self.known.records)

    def publish(self, version: int) -> dict[str, float]:
        """Snapshot, stage, swap and resume; see the four."""
        self.snapshot(version)
        staged = self.stage(version)
        self.swap(staged)
        return self.resume(staged)

    def snapshot(self, version: int) -> None:
        """Have the trainer copy its weights, if it is not to wait until they are sent.

        Raises:
            PublishFailed: it could not.
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
        """Bring the trainer's weights beside those that the replicas generate with, which they go on doing.

        Replicas that have started since the last publication take part.

        Raises:
            NoReplicaLeft: no replica has taken the version.
            PublishFailed: the trainer could not send.
        """
        if self._replacements is not None:
            self.add_replicas(self._replacements.take())
        staged = StagedVersion(version)
        if not self._in_place:
            self._timed(staged, self._transfer(staged))
        return staged

    def swap(self, staged: StagedVersion) -> None:
        """Pause generation and make the staged weights the live ones; none generates from here to `resume`.

        Raises:
            NoReplicaLeft: no replica holds the version.
            PublishFailed: weights are loaded in place, and the trainer could not send.
        """
        self._timed(staged, self._swap(staged))

    def resume(self, staged: StagedVersion) -> dict[str, float]:
        """Have the replicas that hold the version generate, and lost ones replaced; returns metrics of the sync.

        Raises:
            NoReplicaLeft: none of them does.
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
            # What an engine holds in a wider dtype is known to the extension that stages.
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
        """Bring the version to the replicas and note in ``staged`` which have it; the others leave routing."""
        version = staged.version
        # One that is gone would be missed in the middle of the transfer, by everyone.
        living = [record for record in self.known.records if not record.dead]
        servers = [record for record in living if not record.generates]
        await asyncio.gather(
            self.known.each("answer", servers, ping, PING_TIMEOUT_S, or_absent=True),
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
        if not any(record.generates for record in staged.holders):
            raise self._no_replica(f"no rollout replica holds version {version}", self.known.records)

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
        if not any(record.generates for record in staged.holders):
            raise self._no_replica(f"no rollout replica holds version {staged.version}", self.known.records)

    async def _load_with_retries(self, staged: StagedVersion) -> list[ReplicaRecord]:
        """Those that committed in the last attempt; PublishFailed if the trainer could not send in any."""
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
            await self.known.each("answer", self.known.present, ping, PING_TIMEOUT_S)
            if attempt > 1 and self.known.present and self._is_the_cause(trainer_error):
                raise PublishFailed(f"the trainer could not send version {version}: {trainer_error}") from trainer_error
            # In a collective transfer one member that fails fails it for all: the others go on without it.
            failed = [record for record in candidates if record not in committed and not record.dead]
            own = [record for record in failed if failed_by_itself(record, trainer_error)]
            if attempt > 1 and (own == failed or len(own) == len(candidates)):
                break
            refused = own if attempt > 1 else [record for record in own if isinstance(record.error, WeightLoadError)]
            if len(refused) == len(candidates):
                refused = []
        return committed

    def _no_replica(self, what: str, records: list[ReplicaRecord]) -> NoReplicaLeft:
        error = NoReplicaLeft(f"{what}: {self.known.errors}")
        error.__cause__ = next((record.error for record in records if record.error is not None), None)
        return error

    def _is_the_cause(self, trainer_error: BaseException | None) -> bool:
        """Whether the trainer failed on its own: it fails too when a receiver leaves in the middle of a transfer."""
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
        """One transfer to all ``records``. Returns those that committed, the sender's metrics and its error."""
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
        except Exception as error:  # whoever is dead is found by asking each replica
            for record in records:
                record.error = error
            return [], {}, error
        finally:
            await group.tell("finalize")
        committed, metrics, checksum, trainer_error = judged(records, version, results, self.actor_wg.world_size)
        if committed:
            self.checksum = checksum
        return committed, metrics, trainer_error

    @property
    def _answer_s(self) -> float:
        # The transfer has a deadline of its own; this one is behind it, so that its error is the one reported.
        return self.known.timeout_s + PING_TIMEOUT_S

    async def outcomes(self, references: list[Any]) -> list[Any]:
        """Each reference's value, or the exception it ended with; one that is late ends with TimeoutError."""
        return await outcomes(references, self._answer_s)

    async def _all(self, references: list[Any]) -> list[Any]:
        found = await self.outcomes(references)
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
        return found

    async def _unroute(self, records: list[ReplicaRecord]) -> None:
        """Take replicas out of routing, then send away the requests that wait at their servers.

        Of a replica whose weight worker died the server still lives, paused, with requests that wait at it. A server
        that is dead itself has failed them already.
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
        if not self.live_replicas:
            raise self._no_replica(f"no rollout replica resumed with version {staged.version}", records)

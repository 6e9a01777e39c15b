# SPDX-License-Identifier: Apache-2.0
"""Checkpoint engine ``recipe_gloo``: weights from trainer rank 0 to every receiver, through host memory.

It is for machines without an accelerator, and for trainer and rollout on one host; tensors on a device are copied to
the host bucket by bucket. Buckets travel through shared memory when all members are on one host, else over gloo; gloo
connects the members in both cases. It is selected by settings alone::

    actor_rollout_ref.rollout.checkpoint_engine.backend=recipe_gloo
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=recipe.laptop.transfer.gloo_engine
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.recipe_gloo.timeout_s=600

Contract:

- The group is kept between syncs. verl's manager calls `prepare`, `build_topology` and `init_process_group` at every
  sync; as long as every member reports the same group and rank, these only compare. After any failure, or when the
  members change, a new group is created; no process needs a restart.
- Nothing waits for ever: a whole sync has ``timeout_s`` on each side, connecting has ``connect_timeout_s``. A sender
  whose receiver dies fails as soon as the connection closes, or else at its deadline. A receiver whose consumer stops
  early leaves the group, so the sender fails too. Errors are `WeightStreamError`. A sender that failed still iterates
  over its weights to the end, since the other trainer ranks gather them with it.
- Blocking calls run in order on a thread of the engine's own; the event loop stays free.
- A sender returns when every receiver has consumed the whole stream, so the sender's success implies theirs.
- A received tensor is a view of a reused buffer, which other receivers may read too: it is valid until the next one is
  requested, and must not be written to. Copy it to keep it.
- Buffers stay allocated between syncs and are freed after a failed one: two buckets (on one host: four, for all members
  together), each of at most `MAX_BUCKET_BYTES` or the largest tensor that it carried.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from recipe.async_engine.core.errors import SettingError, WeightStreamError
from recipe.async_engine.outside import HOST_BACKEND
from recipe.async_engine.weights.engine_parts import CycleCollector, consume, deadlines, on_this_device
from recipe.laptop.transfer.buckets import DATA, END, BucketReader, BucketWriter
from recipe.laptop.transfer.gloo_group import Deadline, GlooGroup, connect_store, node_address, open_store
from recipe.laptop.transfer.transport import SharedSegments, Transport, shared_memory_domain

logger = logging.getLogger(__name__)

BACKEND = HOST_BACKEND
# Larger buckets are not faster on one host or over loopback, and several of them are kept.
MAX_BUCKET_BYTES = 64 << 20
OUTSIDE = -1
NOT_CONNECTED = "call prepare and init_process_group first"

T = TypeVar("T")


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """One member of a weight sync.

    Args:
        bucket_size: verl's ``update_weights_bucket_megabytes`` in bytes. A bucket has at most `MAX_BUCKET_BYTES`,
            unless a single tensor has more.
        is_master: whether this is trainer rank 0, which sends.
        timeout_s: longest time of one sync.
        connect_timeout_s: longest time to connect a new group; at most ``timeout_s``.
        shared_memory: whether to use shared memory when all members are on one host.
    """

    wire_format = "named_tensors"
    from_host = True
    """Weights may be in host memory, on whatever device they are trained."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 60.0,
        shared_memory: bool = True,
    ) -> None:
        if bucket_size <= 0:
            raise SettingError("checkpoint_engine.update_weights_bucket_megabytes", bucket_size >> 20, "at least 1")
        self._bucket_bytes = min(bucket_size, MAX_BUCKET_BYTES)
        self._is_master = is_master
        self._timeout_s, self._connect_timeout_s = deadlines(BACKEND, timeout_s, connect_timeout_s)
        self._executor = _new_executor()
        self._store: dist.TCPStore | None = None
        self._transport: Transport | None = None
        self._segments: SharedSegments | None = None
        self._domain = shared_memory_domain() if shared_memory else None
        self._left_because = ""
        self._cycles = CycleCollector()

    # Membership

    def prepare(self) -> dict[str, Any]:
        """Report this member's group and, on the master, the address of the rendezvous store, as plain data."""
        group = None if self._transport is None else self._transport.group
        report = {
            "group": None if group is None else [group.group_id, group.rank, group.world_size],
            "domain": self._domain,
            "endpoint": None,
            "segments": None,
        }
        if self._is_master:
            if self._store is None:
                self._store = open_store(node_address(), self._connect_timeout_s)
            if self._segments is None and self._domain is not None:
                self._segments = SharedSegments.create()
            report["endpoint"] = [self._store.host, self._store.port]
            report["segments"] = None if self._segments is None else self._segments.path
        return report

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give trainer rank 0 the first rank and the receivers those after it; other trainer ranks stay outside.

        The members keep their group if all of them report it with exactly these ranks, else a new one is named.
        """
        endpoint = metadata[0]["endpoint"]
        if endpoint is None:
            raise WeightStreamError("trainer rank 0 did not report where to meet: it is not the master of its engine")
        members = [metadata[0], *metadata[actor_wg_world_size:]]
        world_size = 1 + rollout_world_size
        current = metadata[0]["group"]
        kept = current is not None and all(
            member["group"] == [current[0], rank, world_size] for rank, member in enumerate(members)
        )
        epoch = current[0] if kept else uuid.uuid4().hex
        one_host = len({member["domain"] for member in members}) == 1
        segments = metadata[0]["segments"] if one_host else None

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            count = len(ranks)
            common = {"world_size": world_size, "epoch": epoch, "endpoint": endpoint, "segments": segments}
            return {"rank": ranks} | {name: [value] * count for name, value in common.items()}

        outside = [OUTSIDE] * (actor_wg_world_size - 1)
        return arguments([0, *outside]), arguments(list(range(1, world_size)))

    def init_process_group(
        self, rank: int, world_size: int, epoch: str, endpoint: list[Any], segments: str | None
    ) -> None:
        """Join group ``epoch``, or keep it if it is the present one; trainer ranks except the sender stay outside."""
        if rank == OUTSIDE or self.topology_epoch() == epoch:
            return
        shared = self._segments
        self.reset()
        if self._is_master:
            self._segments = shared
        else:
            host, port = endpoint
            self._store = connect_store(host, port, self._connect_timeout_s)
            shared = None if segments is None else SharedSegments(segments)
        assert self._store is not None, "init_process_group before prepare on the master"
        group = GlooGroup(epoch, self._store, rank, world_size, node_address(), self._connect_timeout_s)
        # Once all members have connected, every member has opened the segments.
        self._transport = Transport(group, None if segments is None else shared)

    def topology_epoch(self) -> str | None:
        """Return the name of the group in which this member is connected, or None if it has to be built."""
        return None if self._transport is None else self._transport.group.group_id

    def finalize(self) -> None:
        """End a sync; group and buffers are kept for the next one unless it failed."""
        self._cycles.clear()

    def reset(self, reason: str = "") -> None:
        """Leave the group: peers in the middle of a sync fail, and the next sync builds a new group."""
        self._left_because = reason
        transport, self._transport = self._transport, None
        self._segments = None
        if transport is None:
            return
        self._cycles.add()
        # A call may still run on the thread and use the buckets, up to its deadline, so both are left to it.
        self._executor.submit(transport.group.close)
        self._executor.shutdown(wait=False)
        self._executor = _new_executor()

    # Sending

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send all of ``weights`` as version ``global_steps``; on other trainer ranks only iterate over them.

        ``weights`` is iterated on the engine's thread, because gathering a sharded parameter is a blocking collective.

        Returns:
            ``weight_sync/{bytes,tensors,seconds,gb_per_s}``; empty on trainer ranks other than 0.

        Raises:
            WeightStreamError: a receiver is gone or the deadline has passed.
        """
        transport = self._transport
        if transport is None:
            if self._is_master:
                raise WeightStreamError(f"no group to send in: {self._left_because or NOT_CONNECTED}")
            await self._on_thread(lambda: consume(weights))
            return {}
        with self._dropping_group():
            return await self._on_thread(lambda: self._send(transport, weights, global_steps))

    def _send(
        self, transport: Transport, weights: Iterable[tuple[str, torch.Tensor]], version: int | None
    ) -> dict[str, float]:
        started = time.monotonic()
        deadline = Deadline(self._timeout_s)
        writer = BucketWriter(transport.buckets, self._bucket_bytes, version)
        iterator = iter(weights)
        frames = writer.frames(iterator)
        label = f"sending version {version} to {transport.group.world_size - 1} receivers"
        try:
            while True:
                try:
                    frame = next(frames, None)
                except Exception as error:
                    with suppress(WeightStreamError):  # the error is raised here even if receivers cannot be told
                        transport.send(writer.abort(f"{type(error).__name__}: {error}"), deadline, label)
                        transport.group.finish(label)
                    raise
                if frame is None:
                    break
                transport.send(frame, deadline, label)
            transport.confirm(deadline, label)
        except WeightStreamError:
            transport.group.close()
            consume(iterator)
            raise
        seconds = time.monotonic() - started
        return {
            "weight_sync/bytes": writer.totals.nbytes,
            "weight_sync/tensors": writer.totals.tensors,
            "weight_sync/seconds": seconds,
            "weight_sync/gb_per_s": writer.totals.nbytes / 1e9 / max(seconds, 1e-9),
        }

    # Receiving

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield name and tensor of each weight, in order; a tensor is valid until the next is requested.

        Raises:
            WeightStreamError: the stream is not version ``global_steps`` (if given), not complete, or corrupt.
        """
        transport = self._transport
        if transport is None:
            raise WeightStreamError(f"no group to receive in: {self._left_because or NOT_CONNECTED}")
        deadline = Deadline(self._timeout_s)
        reader = BucketReader(global_steps)
        with self._dropping_group():
            turn = 0
            arrival = self._on_thread(partial(transport.receive, 0, reader, deadline))
            try:
                while True:
                    header, body = await arrival
                    if header.kind == DATA:
                        turn += 1
                        # While the consumer works on this frame, the next one arrives.
                        arrival = self._on_thread(partial(transport.receive, turn, reader, deadline))
                    for named_tensor in reader.tensors(header, body):
                        yield named_tensor
                    if header.kind == END:
                        break
            finally:
                arrival.cancel()
            await self._on_thread(lambda: transport.confirm(deadline, f"confirming version {global_steps}"))

    # Shared

    def _on_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, on_this_device(call))

    @contextmanager
    def _dropping_group(self) -> Iterator[None]:
        """Leave the group on any failure, cancellation or early end, since it is then out of step."""
        self._left_because = ""
        try:
            yield
        except BaseException as error:
            name, reason = type(error).__name__, self._left_because
            logger.warning("weight sync ended early (%s: %s); the next one builds a fresh group", name, error)
            self.reset()
            if reason and isinstance(error, WeightStreamError):
                raise WeightStreamError(f"{error}; this member had left the sync: {reason}") from error
            raise


def _new_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync")

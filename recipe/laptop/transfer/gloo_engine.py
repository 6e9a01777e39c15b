# SPDX-License-Identifier: Apache-2.0
"""Checkpoint engine ``recipe_gloo``: sends weights from trainer rank 0 to every receiver through host memory.

It is for machines without an accelerator, and for trainer and rollout on one host. Tensors on a device are copied to
the host bucket by bucket (a bucket is a buffer for several tensors). Buckets are passed through shared memory if all
members are on one host, otherwise over gloo; gloo connects the members in both cases. An alternative, Ray's object
store with an actor as mailbox, was measured: for 988 MB to one receiver it took 1.5 times as long (2.3 times if the
weights were sent in pieces of bounded size), and it took seconds to create a group. To select this engine, set::

    actor_rollout_ref.rollout.checkpoint_engine.backend=recipe_gloo
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=recipe.laptop.transfer.gloo_engine
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.recipe_gloo.timeout_s=600

Contract:

- The group is kept between syncs. verl's manager calls `prepare`, `build_topology` and `init_process_group` at every
  sync, but these calls change nothing as long as all members report the same group and their old ranks. After any
  failure, or when the members change, a new group is created; no process needs a restart.
- No wait is unbounded: ``timeout_s`` limits a whole sync on each member, and ``connect_timeout_s`` limits connecting.
  If a receiver dies, the sender fails as soon as the connection closes, or else at its deadline. A receiver whose
  consumer stops early leaves the group, so the sender fails too. Errors are `WeightStreamError`. A sender that failed
  still iterates over its weights to the end, because all trainer ranks must take part in gathering them.
- Blocking calls run one after the other on a separate thread, so that the event loop is never blocked.
- A sender returns when every receiver has consumed the whole stream, so if the sender succeeds, all receivers have
  succeeded.
- A received tensor is a view of a reused buffer, which other receivers may read too. It is valid until the next tensor
  is requested, and must not be written to; copy it to keep it.
- Buffers stay allocated between syncs and are freed after a failed sync. Each member has two buckets or, on one host,
  all members together have four. A bucket takes at most `MAX_BUCKET_BYTES`, or the size of the largest tensor that was
  in it.
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
# Limit of a bucket's size, because several buckets stay allocated, and larger ones would not be faster on one host or
# over loopback.
MAX_BUCKET_BYTES = 64 << 20
OUTSIDE = -1
NOT_CONNECTED = "call prepare and init_process_group first"

T = TypeVar("T")


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """One member of a weight sync.

    Args:
        bucket_size: verl's ``update_weights_bucket_megabytes`` in bytes. If it is above `MAX_BUCKET_BYTES`, buckets
            have only that size, unless a single tensor is larger.
        is_master: whether this is trainer rank 0, which sends.
        timeout_s: time limit of one sync in seconds.
        connect_timeout_s: time limit in seconds for connecting a new group; at most ``timeout_s``.
        shared_memory: whether to use shared memory if all members are on one host.
    """

    wire_format = "named_tensors"
    from_host = True
    """Whether `send_weights` accepts tensors in host memory even if the weights are trained on an accelerator."""

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

    def prepare(self) -> dict[str, Any]:
        """Return this member's group and, on trainer rank 0, the address of the rendezvous store, as plain data."""
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
        """Return the arguments of `init_process_group` for each trainer rank and for each receiver.

        Trainer rank 0 gets rank 0 of the group, and the receivers get the ranks after it; other trainer ranks are not
        in the group. If all members are already in one group and have exactly these ranks there, the group's name is
        kept, so that nobody reconnects; otherwise a new name is chosen.
        """
        endpoint = metadata[0]["endpoint"]
        if endpoint is None:
            raise WeightStreamError("trainer rank 0 has no rendezvous store: its engine needs is_master=True")
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
        """Join the group named ``epoch``, unless this process is already in it. With the rank `OUTSIDE`, do nothing."""
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
        # Receivers open the shared memory before they connect. So when the group is complete, all of them have opened
        # it.
        self._transport = Transport(group, None if segments is None else shared)

    def topology_epoch(self) -> str | None:
        """Return the name of the group to which this member is connected, or None if it is in no group."""
        return None if self._transport is None else self._transport.group.group_id

    def finalize(self) -> None:
        """End a sync. After a successful sync, group and buffers are kept for the next one."""
        self._cycles.clear()

    def reset(self, reason: str = "") -> None:
        """Leave the group; the next sync builds a new one. A sync in progress then fails on the other members too."""
        self._left_because = reason
        transport, self._transport = self._transport, None
        self._segments = None
        if transport is None:
            return
        self._cycles.add()
        # A call may still run on the old thread, until its deadline. So close the group on that thread, after the call,
        # and use a new thread from now on.
        self._executor.submit(transport.group.close)
        self._executor.shutdown(wait=False)
        self._executor = _new_executor()

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send all of ``weights`` as version ``global_steps``.

        Trainer ranks other than 0 send nothing, and only iterate over ``weights``. The iteration runs on the thread
        for blocking calls, because gathering a sharded parameter is a blocking collective.

        Returns:
            The metrics ``weight_sync/{bytes,tensors,seconds,gb_per_s}``; nothing on trainer ranks other than 0.

        Raises:
            WeightStreamError: a receiver has died or left, or the deadline has passed.
        """
        transport = self._transport
        if transport is None:
            if self._is_master:
                raise WeightStreamError(f"the sender of weights is in no group: {self._left_because or NOT_CONNECTED}")
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
                    with suppress(WeightStreamError):  # The weights' error is raised even if no receiver can be told.
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
            "weight_sync/bytes": writer.nbytes,
            "weight_sync/tensors": writer.tensors,
            "weight_sync/seconds": seconds,
            "weight_sync/gb_per_s": writer.nbytes / 1e9 / max(seconds, 1e-9),
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield (name, tensor) for each weight, in the order of sending. A tensor is valid until the next is requested.

        Raises:
            WeightStreamError: the stream is incomplete or corrupt, or has another version than ``global_steps`` (if
                given); the sender has died or left; or the deadline has passed.
        """
        transport = self._transport
        if transport is None:
            raise WeightStreamError(f"a receiver of weights is in no group: {self._left_because or NOT_CONNECTED}")
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
                        # Start to receive the next frame while the consumer works on this one.
                        arrival = self._on_thread(partial(transport.receive, turn, reader, deadline))
                    for named_tensor in reader.tensors(header, body):
                        yield named_tensor
                    if header.kind == END:
                        break
            finally:
                arrival.cancel()
            await self._on_thread(lambda: transport.confirm(deadline, f"confirming version {global_steps}"))

    def _on_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, on_this_device(call))

    @contextmanager
    def _dropping_group(self) -> Iterator[None]:
        """Leave the group if the block fails, is cancelled or ends early, because the members are then out of step."""
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

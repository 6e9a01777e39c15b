# SPDX-License-Identifier: Apache-2.0
"""verl's checkpoint engine ``nccl``, changed so that waits have deadlines, and members may join, leave and die.

The protocol on the wire is verl's. These settings make it replace verl's engine::

    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=recipe.async_engine.weights.nccl_engine

Contract:

- The group is kept between syncs as long as every member reports the same group and the same ranks; otherwise a group
  with a new name is created. (verl creates a group for each sync, or one for all syncs, always with the same name.)
- No wait is unbounded: ``timeout_s`` limits a sync on every member, and ``connect_timeout_s`` limits joining a group.
  NCCL itself detects neither a dead nor a hanging member: the device waits until the communicator is aborted. `reset`
  aborts it at once, from another thread. It must be called on every member when one of them has failed, which
  `recipe.async_engine.weights.publisher` does.
- Data that an abort leaves in a buffer are never used as weights: after an abort the transfer yields nothing and fails.
- A sender that failed still iterates over its weights to the end, since the other trainer ranks take part in gathering
  them.
- Sending does not block an event loop.
- A sender without relays (other ranks on its node that pass weights on) may send while training goes on: it neither
  waits for work that training has queued on the device nor delays that work. It fills buckets on one CUDA stream of its
  own and sends them on another; neither stream is synchronized with the default stream. (verl synchronizes the whole
  device for each bucket, and Ray's stream and the default stream wait for each other.) Weights in pinned memory are
  copied directly into a bucket.
- A bucket (a buffer for several tensors) is not refilled before it has been sent: its broadcast is issued synchronously
  and awaited. (verl starts a broadcast on a thread and then synchronizes the device, nccl_checkpoint_engine.py:353.
  If the thread issues the broadcast only after this synchronization, all receivers get the contents of the next
  bucket instead.)
- The sender computes the checksum (`recipe.async_engine.weights.checksum`) from the buckets that it sends, and
  ``send_weights`` returns it.

With relays, verl's code sends the weights. As in verl, tensors must be contiguous, tensors without elements do not
arrive, and a sender returns when it has sent its last bucket. If one member never joins a group, each of the others
keeps a thread that waits for it. Shown by tests/integration/test_nccl_engine.py, over gloo; not tried on an accelerator
yet.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import cupy as cp
import torch
import zmq
from ray.util import collective
from verl.checkpoint_engine.base import CheckpointEngineRegistry, split_weight_chunks
from verl.checkpoint_engine.nccl_checkpoint_engine import (
    BroadcastOperation,
    MasterMetadata,
    NCCLCheckpointEngine,
    WorkerMetadata,
)

from recipe.async_engine.core.errors import WeightStreamError
from recipe.async_engine.weights.checksum import CHECKSUM, StreamChecksum
from recipe.async_engine.weights.engine_parts import CycleCollector, consume, deadlines, on_this_device
from recipe.async_engine.weights.nccl_parts import Bucket, InlineExecutor, within

LOOK_MS = 100
"""While a receiver waits for a bucket's description, it checks at this interval in ms whether it has left its group."""


@dataclass
class Member(WorkerMetadata):
    """The metadata that a member of a weight sync reports before the sync.

    ``place`` has the name of the NCCL group that the member is in, the member's rank and the world size. It is None if
    the member is in no group.
    """

    place: tuple[str, int, int] | None = None


class Group:
    """An NCCL group that this process joins once, and can leave from any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left: str | None = None
        """The reason why this process left the group, or None if it has not left."""
        self._lock = threading.Lock()

    def leave(self, reason: str) -> None:
        """Leave the group because of ``reason``. A transfer that is going on is aborted."""
        with self._lock:
            if self.left is not None:
                return
            self.left = reason
        # Abort on a thread, because NCCL's abort may wait until all members on this node have called it.
        threading.Thread(target=self._abort, name="leave-nccl-group", daemon=True).start()

    def join(self, world_size: int, rank: int, stream: Any) -> None:
        """Join the group, and make its collectives run on the CUDA stream ``stream``.

        Ray's own stream is not used, because Ray's stream and the default stream wait for each other.
        """
        collective.init_collective_group(world_size, rank, "nccl", self.name)
        rays, device = collective.get_group_handle(self.name), torch.cuda.current_device()
        rays._get_nccl_collective_communicator(str(device), [device])
        rays._dev_streams_map[str(device)] = [cp.cuda.ExternalStream(stream.cuda_stream)]

    def end_rendezvous(self) -> None:
        """Kill the detached Ray actor through which the members found each other, because it would outlive the run."""
        rays = collective.get_group_handle(self.name)
        # Each communicator has a rendezvous actor, named after the communicator's devices. `_dev_comm_map` lacks a
        # communicator that could not be created, but its actor may exist, so add the devices in use.
        for key in {*rays._dev_comm_map, ",".join(map(str, rays._used_gpu_indices))}:
            with suppress(ValueError):
                rays._destroy_store(rays._generate_group_key(key))

    def check(self, what: str) -> None:
        if self.left is not None:
            raise WeightStreamError(f"{what} was broken off: {self.left}")

    def _abort(self) -> None:
        if not collective.is_group_initialized(self.name):
            return
        for communicators in collective.get_group_handle(self.name)._dev_comm_map.values():
            for communicator in communicators:
                communicator.abort()
        if collective.get_rank(self.name) == 0:
            self.end_rendezvous()
        with suppress(ValueError):  # Ray does not find the actor, which is killed already
            collective.destroy_collective_group(self.name)


class BucketDescriptions:
    """The socket from which a receiver reads descriptions of buckets. A read fails if this process leaves ``group``."""

    def __init__(self, socket: zmq.Socket[bytes], group: Group) -> None:
        self._socket = socket
        self.group = group

    def recv_string(self) -> str:
        while not self._socket.poll(LOOK_MS):
            self.group.check("waiting for the next bucket")
        return self._socket.recv_string()

    def recv_pyobj(self) -> Any:
        # The second part of a message arrives together with the first, so this does not block.
        return self._socket.recv_pyobj()

    def close(self) -> None:
        """Close the socket. Python's garbage collector would hang if it deleted the context of an open socket."""
        self._socket.close(linger=0)


@CheckpointEngineRegistry.register("nccl")
class BoundedNCCLCheckpointEngine(NCCLCheckpointEngine):
    """The checkpoint engine of one member of a weight sync.

    Args:
        bucket_size: size of a bucket in bytes, as in verl.
        timeout_s: seconds that one sync may take.
        connect_timeout_s: seconds that joining a group may take, at most ``timeout_s``.
        settings: verl's other arguments. With ``rebuild_group`` every sync creates a new group.
    """

    rebuild_group: bool
    socket: Any
    send_buf: Any
    recv_buf: Any
    rank: int
    num_senders = 0
    from_host = sums_what_it_sends = True
    """``from_host``: weights may be in host memory. ``sums_what_it_sends``: `send_weights` returns the checksum."""

    def __init__(
        self, bucket_size: int, timeout_s: float = 600.0, connect_timeout_s: float = 180.0, **settings: Any
    ) -> None:
        self._timeout_s, self._connect_timeout_s = deadlines("nccl", timeout_s, connect_timeout_s)
        super().__init__(bucket_size, **settings)
        self._keeps_group, self.rebuild_group = not self.rebuild_group, False
        self._group: Group | None = None
        self._under_way = threading.Lock()
        self._cycles = CycleCollector()
        self._streams: tuple[Any, Any] | None = None

    @property
    def _own_streams(self) -> tuple[Any, Any]:
        """The CUDA streams for filling and for sending buckets, which do not synchronize with the default stream."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        return self._streams

    @contextmanager
    def _filling(self) -> Iterator[Any]:
        """Make the stream for filling buckets current in torch and cupy during the ``with`` block, and yield it."""
        stream, _ = self._own_streams
        with torch.cuda.stream(stream), cp.cuda.ExternalStream(stream.cuda_stream):
            yield stream

    def prepare(self) -> Member:
        """Allocate the buckets, and return this process's metadata, including the group that it is in."""
        # Zero the sender's buckets on the stream that later fills them, so that they are zeroed before they are filled.
        with self._filling() if self.is_master else nullcontext():
            reported = super().prepare()
        group = self._group
        place = None if group is None or group.left is not None else (group.name, self.rank, self.world_size)
        return Member(reported.node_id, reported.master, place)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Member]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return verl's topology, and in it the name of the group that the members have to join.

        If all members report that they are in the same group, with the same ranks as in the topology, the name is that
        of this group. Otherwise it is a new name.
        """
        topology = super().build_topology(actor_wg_world_size, rollout_world_size, metadata)
        ranks = [rank for side in topology for rank in side["rank"]]
        world_size = topology[0]["world_size"][0]
        sender = metadata[0].place
        name = f"weights_{uuid.uuid4().hex}"
        if sender is not None and all(
            member.place == (sender[0], rank, world_size)
            for member, rank in zip(metadata, ranks, strict=True)
            if rank >= 0
        ):
            name = sender[0]
        for side in topology:
            side["group"] = [name] * len(side["rank"])
        return topology

    def init_process_group(
        self, rank: int, world_size: int, master_metadata: MasterMetadata, num_senders: int, group: str
    ) -> None:
        """Join ``group``, unless this process is in it already.

        Raises:
            WeightStreamError: not all members joined in time, or this process's last transfer has not ended.
        """
        self.num_senders = num_senders
        if rank < 0:
            super().init_process_group(rank, world_size, master_metadata, num_senders)
            return
        if self._group is not None and self._group.name == group and self._group.left is None:
            return
        self.reset("another group takes its place")
        if not self._under_way.acquire(timeout=self._connect_timeout_s):
            raise WeightStreamError(f"rank {rank}: the last transfer did not end within {self._connect_timeout_s:g} s")
        self._under_way.release()
        joined = self._group = Group(group)
        self.rank, self.world_size = rank, world_size
        # Descriptions of buckets are published only to members of this group.
        self.group_name = self.topic = group
        try:
            join = partial(super().init_process_group, rank, world_size, master_metadata, num_senders)
            within(self._connect_timeout_s, on_this_device(partial(self._join, joined, master_metadata, join)))
            if rank == 0:
                joined.end_rendezvous()
        except Exception as error:
            joined.leave(f"not joined: {error}")
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, TimeoutError | RuntimeError):
                raise  # These errors are this process's own; other members cause timeouts and broken connections.
            raise WeightStreamError(
                f"rank {rank} of {world_size} could not join the other members of the weight sync within "
                f"connect_timeout_s={self._connect_timeout_s:g}: {type(error).__name__}: {error}"
            ) from error

    def _join(self, group: Group, master: MasterMetadata, verls: Callable[[], None]) -> None:
        # If other trainer ranks pass weights on (relays), broadcast on Ray's stream, so that broadcasts and the
        # collectives of training keep their order.
        if self.num_senders > 1:
            verls()
            return
        if self.rank:
            # Subscribe before joining, because a subscriber does not get messages that were published earlier.
            self._connect_zmq_client(master)
        group.join(self.world_size, self.rank, self._own_streams[1])
        with self._filling():
            verls()

    def _connect_zmq_client(self, metadata: MasterMetadata) -> None:
        before = getattr(self, "socket", None)
        if before is not None:
            if before.group is self._group:
                return
            before.close()
        super()._connect_zmq_client(metadata)
        assert self._group is not None, "only called while a group is joined"
        self.socket = BucketDescriptions(self.socket, self._group)

    def finalize(self) -> None:
        """Free the buckets. The group is kept, unless ``rebuild_group`` is set."""
        self.send_buf = self.recv_buf = None
        self._cycles.clear()
        # Only receivers call verl's finalize: it empties torch's cache, which waits for all work that training has
        # queued on the device.
        if 0 < self.num_senders <= self.rank:
            super().finalize()
        if not self._keeps_group:
            self.reset("rebuild_group is set")

    def reset(self, reason: str = "reset() was called") -> None:
        """Leave the group. A transfer in this process fails with ``reason``, and the next sync creates a new group."""
        if self._group is not None:
            self._cycles.add()
            self._group.leave(reason)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Send ``weights`` as verl does, but on a thread, because gathering a tensor is a blocking collective.

        Returns:
            On the sending rank, a dict with the checksum under the key `CHECKSUM`; None on the others.

        Raises:
            WeightStreamError: this member left the group, or the deadline passed.
        """
        what, iterator = f"sending version {global_steps}", iter(weights)
        sums = StreamChecksum()
        sending: Callable[[], Any] = partial(super().send_weights, iterator, global_steps)
        if self.rank == 0 and self.num_senders == 1:
            sending = partial(self._send_alone, iterator, sums)
        elif self.rank == 0:
            sending = partial(super().send_weights, sums.passing(iterator), global_steps)

        def send() -> dict[str, Any] | None:
            with self._alone(what):
                try:
                    watched = nullcontext() if self._group is None else self._watched(what)
                    with watched, asyncio.Runner() as runner:
                        runner.get_loop().set_default_executor(InlineExecutor(1))
                        runner.run(sending())
                        return {CHECKSUM: sums.value()} if self.rank == 0 else None
                finally:
                    consume(iterator)
                    if self.rank == 0 and self.num_senders == 1:
                        # Synchronize even after a failure, because the buckets' memory is reused. This cannot hang: a
                        # hanging operation is aborted when this process leaves the group.
                        for stream in self._own_streams:
                            stream.synchronize()

        return await asyncio.to_thread(on_this_device(send))

    @torch.no_grad()
    async def _send_alone(self, weights: Iterator[tuple[str, torch.Tensor]], sums: StreamChecksum) -> None:
        bucket, other = Bucket(self.send_buf), Bucket(self.recv_buf)
        filling, _ = self._own_streams
        async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
            meta.offset = bucket.place(meta.chunk_size)
            if meta.offset is None:
                await self._broadcast(bucket, is_last=False)
                bucket, other = other, bucket
                bucket.empty()
                meta.offset = 0
            gathering = torch.cuda.current_stream()
            if not chunk.is_cpu:
                filling.wait_stream(gathering)
            with self._filling():
                sums.add_chunk(meta, bucket.fill(meta, chunk))
            if not chunk.is_cpu:
                # The chunk's memory may be reused to gather the next chunk, so make gathering wait for the copy.
                gathering.wait_stream(filling)
        await self._broadcast(bucket, is_last=True)
        for sent in (other, bucket):
            sent.empty()
        with self._filling():
            sums.value()

    async def _broadcast(self, bucket: Bucket, is_last: bool) -> None:
        meta = {"bucket_meta": bucket.holds, "is_last": is_last, "length": bucket.length}
        # The broadcast waits only for cupy's current stream. Therefore make the stream that fills the bucket current.
        with self._filling():
            sending = BroadcastOperation(self.rank, self.group_name, bucket.filled, meta, self.socket, self.topic)
        await sending.wait_for_complete()
        bucket.left = torch.cuda.Event()
        bucket.left.record(self._own_streams[1])

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Receive weights as verl does, and yield (name, tensor) for each.

        A tensor is a view of a buffer that is reused, and is valid only until the next one is requested.

        Raises:
            WeightStreamError: this member left the group, or the deadline passed.
        """
        what = f"receiving version {global_steps}"
        with self._alone(what), self._watched(what) as group:
            async for named_tensor in super().receive_weights(global_steps):
                group.check(what)
                yield named_tensor

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._under_way.acquire(blocking=False):
            raise WeightStreamError(f"{what} is impossible: the last transfer of this member has not ended")
        try:
            yield
        finally:
            self._under_way.release()

    @contextmanager
    def _watched(self, what: str) -> Iterator[Group]:
        """Leave the group if the ``with`` block fails, ends early or takes too long: members are then out of step."""
        group = self._group
        if group is None:
            raise WeightStreamError(f"{what} is impossible without a group: call prepare and init_process_group first")
        group.check(what)
        late = threading.Timer(self._timeout_s, group.leave, [f"it was not over within timeout_s={self._timeout_s:g}"])
        late.daemon = True
        late.start()
        try:
            yield group
        except BaseException as error:
            self._cycles.add()
            was_left = group.left is not None
            group.leave(f"{type(error).__name__}: {error}")
            if was_left and isinstance(error, Exception):
                raise WeightStreamError(f"{what} was broken off: {group.left}") from error
            raise
        finally:
            late.cancel()
        group.check(what)

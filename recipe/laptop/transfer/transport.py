# SPDX-License-Identifier: Apache-2.0
"""Sends frames to the receivers of a weight sync, through the gloo group or through shared memory.

A frame is a header and a body, which is packed into one of several buckets. When `send` returns, the sender may fill
the bucket of the next frame. `receive` returns frame n, whose body stays valid until frame n + 2 is requested. The
sender and all receivers call `confirm` at the end of a sync; it returns when every receiver has consumed the whole
stream. All calls block, but not beyond the deadline.

If all members are on one host, the sender packs frames into shared memory, from which the receivers read them. So each
byte is copied only once, however many receivers there are, and gloo transfers only the headers.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import BinaryIO

import torch

from recipe.async_engine.core.errors import WeightStreamError
from recipe.laptop.transfer.buckets import HEADER_FIELDS, BucketReader, Buckets, Frame, Header
from recipe.laptop.transfer.gloo_group import Deadline, GlooGroup

# The sender fills one segment, while receivers may still use the frames in the other three.
SHARED_SEGMENTS = 4
# A segment is larger than any tensor. Pages that were never written take no memory.
SEGMENT_BYTES = 1 << 36


class Transport:
    """Broadcasts the header of each frame and, unless it is in one of the ``shared`` segments, the body.

    With shared memory, there is a barrier before each frame except the first two. A receiver enters the barrier before
    frame n when it has consumed frame n - 2. Before the sender sends frame n, it waits until all members have entered
    the barrier before frame n - 1; only then does it refill a segment that an earlier frame used.

    While a barrier is pending, a member (the sender or a receiver) starts no further operation that waits for another
    member. A member that fails could not close its connections while such an operation is running, and the other
    members would not notice the failure until then.
    """

    def __init__(self, group: GlooGroup, shared: SharedSegments | None) -> None:
        self.buckets = shared.buckets if shared else Buckets.growing()
        self.group = group
        self._is_shared = shared is not None
        self._sent = 0

    def send(self, frame: Frame, deadline: Deadline, what: str) -> None:
        if self._is_shared and self._sent > 1:
            self.group.finish(what, leaving=1)  # The broadcast of the previous frame's header may remain.
            self.group.start_barrier(deadline, what)
        self.group.start_broadcast(frame.header, deadline, what)
        if not self._is_shared:
            self.group.start_broadcast(frame.body, deadline, what)
            # Wait only for earlier frames, so that this frame is transferred while the next one is packed.
            self.group.finish(what, leaving=2)
        self._sent += 1

    def receive(self, turn: int, reader: BucketReader, deadline: Deadline) -> tuple[Header, torch.Tensor]:
        what = f"receiving weights on rank {self.group.rank} ({reader.position})"
        fields = torch.empty(HEADER_FIELDS, dtype=torch.int64)
        if self._is_shared and turn > 1:
            self.group.start_barrier(deadline, what)
            self.group.finish(what)
        self.group.start_broadcast(fields, deadline, what)
        self.group.finish(what)
        header = reader.header(fields.tolist())
        body = self.buckets.room(turn, header.body_bytes)
        if not self._is_shared:
            self.group.start_broadcast(body, deadline, what)
            self.group.finish(what)
        return header, body

    def confirm(self, deadline: Deadline, what: str) -> None:
        self._sent = 0
        self.group.start_barrier(deadline, what)
        self.group.finish(what)


class SharedSegments:
    """Anonymous shared memory, divided into buckets. The sender creates it, and receivers open it through /proc.

    Receivers can only read the memory, so no receiver can corrupt what the others get. The memory is not a file in any
    file system, so nothing is left behind however the processes end, and the size of /dev/shm does not matter. It is
    freed when this object and all mappings of receivers are gone.
    """

    def __init__(self, path: str, held: BinaryIO | None = None) -> None:
        # Keep the sender's file open as long as this object exists, because the path becomes invalid when the file is
        # closed.
        self._held = held
        self.path = path
        writes = held is not None
        try:
            with open(path, "r+b" if writes else "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ)
        except OSError as error:
            raise WeightStreamError(
                f"the sender's shared memory {path} cannot be opened ({error}). Set checkpoint_engine.engine_kwargs."
                "recipe_gloo.shared_memory=false to send through gloo instead."
            ) from error
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.buckets = Buckets(torch.frombuffer(memory, dtype=torch.uint8).chunk(SHARED_SEGMENTS))

    @classmethod
    def create(cls) -> SharedSegments:
        file = os.fdopen(os.memfd_create("recipe-weights"), "r+b")
        file.truncate(SHARED_SEGMENTS * SEGMENT_BYTES)
        return cls(f"/proc/{os.getpid()}/fd/{file.fileno()}", file)


def shared_memory_domain() -> str | None:
    """Return a string that two processes share if and only if they can open each other's /proc entries.

    Return None if /proc is not readable. Ray's node ids would not do: two Ray nodes may be on one host, and may be in
    containers that do not see each other's processes.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        spaces = [str(os.stat(f"/proc/self/ns/{space}").st_ino) for space in ("pid", "user")]
        return ":".join([boot, *spaces, str(os.getuid())])
    except OSError:
        return None

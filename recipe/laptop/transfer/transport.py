# SPDX-License-Identifier: Apache-2.0
"""Sends frames to the receivers of a weight sync, through the gloo group or through shared memory.

`send` returns when the bucket of the next frame may be filled; `receive` returns the next frame, whose body stays valid
until the next but one is requested; `confirm` ends a sync on both sides and returns when every receiver has consumed
the whole stream. All calls block, up to the deadline.

Shared memory is for members on one host: the sender packs into memory that the receivers read, so a byte is copied
once, whatever the number of receivers. gloo then carries only headers.
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

# One segment that is being filled, and those of the frames that a receiver may still use.
SHARED_SEGMENTS = 4
# Larger than any tensor; pages that were never written take no memory.
SEGMENT_BYTES = 1 << 36


class Transport:
    """Broadcasts headers, and bodies too unless they are in ``shared`` segments, which are used in turns.

    With shared memory there is a barrier before each frame except the first two, at which a receiver has consumed the
    frame before the last. The sender refills a segment when it has passed the barrier before the newest one.

    No operation that waits for a peer is started before a barrier has been passed: a group closes its connections, by
    which the other members notice a failure, only when none of its operations is in progress.
    """

    def __init__(self, group: GlooGroup, shared: SharedSegments | None) -> None:
        self.buckets = shared.buckets if shared else Buckets.growing()
        self.group = group
        self._is_shared = shared is not None
        self._sent = 0

    def send(self, frame: Frame, deadline: Deadline, what: str) -> None:
        if self._is_shared and self._sent > 1:
            self.group.finish(what, leaving=1)  # the header after the previous barrier
            self.group.start_barrier(deadline, what)
        self.group.start_broadcast(frame.header, deadline, what)
        if not self._is_shared:
            self.group.start_broadcast(frame.body, deadline, what)
            # This frame may still be in transfer while the next one is packed.
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
    """Anonymous memory, divided into buckets, that the sender creates and receivers open through its /proc entry.

    Receivers can only read it, so that none can corrupt what the others get. It has no name in any file system, so none
    is left behind however the processes end, and the size of /dev/shm does not matter. It lives as long as this object
    or a receiver's mapping.
    """

    def __init__(self, path: str, held: BinaryIO | None = None) -> None:
        # The sender's file, which is closed with this object; the path is valid until then.
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
    """Return a string that two processes share exactly if one may open the other's /proc entries, or None.

    Ray's node ids do not show this: two nodes may be on one host, or in containers of one host that share no processes.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        spaces = [str(os.stat(f"/proc/self/ns/{space}").st_ino) for space in ("pid", "user")]
        return ":".join([boot, *spaces, str(os.getuid())])
    except OSError:
        return None

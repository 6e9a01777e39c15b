# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""How frames get from the sender to the receivers of a weight sync: through the gloo group, or through shared memory.

Both transports keep the same promises. `send` returns when the bucket of the frame before may be filled again;
`receive` gives the next frame, whose body stays as it is until the next but one is asked for; `confirm` ends a sync on
both sides and returns when every receiver has gone through the whole stream. All calls block, up to the deadline.

`SharedMemoryTransport` is for members on one host: the sender packs into memory that the receivers read, so a byte is
copied once, whatever the number of receivers. gloo then carries headers and turns only.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from recipe.async_engine.weights.buckets import (
    DATA,
    HEADER_FIELDS,
    BucketReader,
    Frame,
    Header,
    WeightStreamError,
)
from recipe.async_engine.weights.gloo_group import Deadline, GlooGroup

BROADCASTS_PER_FRAME = 2

Buckets = tuple[torch.Tensor, torch.Tensor]


class Transport(Protocol):
    """What the engine needs of a transport."""

    group: GlooGroup
    buckets: Buckets

    def send(self, frame: Frame, deadline: Deadline, what: str) -> None: ...

    def receive(self, turn: int, reader: BucketReader, deadline: Deadline) -> tuple[Header, torch.Tensor]: ...

    def confirm(self, deadline: Deadline, what: str) -> None: ...


class GlooTransport:
    """Header and body of each frame are broadcast. Works between hosts."""

    def __init__(self, group: GlooGroup, bucket_bytes: int) -> None:
        self.group = group
        self.buckets: Buckets = (
            torch.empty(bucket_bytes, dtype=torch.uint8),
            torch.empty(bucket_bytes, dtype=torch.uint8),
        )

    def send(self, frame: Frame, deadline: Deadline, what: str) -> None:
        self.group.start_broadcast(frame.header, deadline, what)
        self.group.start_broadcast(frame.body, deadline, what)
        # This frame may still be on its way, while the next one is packed; the one before must be gone.
        self.group.finish(what, leaving=BROADCASTS_PER_FRAME)

    def receive(self, turn: int, reader: BucketReader, deadline: Deadline) -> tuple[Header, torch.Tensor]:
        what = _receiving(self.group, reader)
        header = _receive_header(self.group, reader, deadline, what)
        body = self.buckets[turn % 2][: header.body_bytes]
        self.group.start_broadcast(body, deadline, what)
        self.group.finish(what)
        return header, body

    def confirm(self, deadline: Deadline, what: str) -> None:
        self.group.finish(what)
        self.group.synchronize(deadline, what)


class SharedMemoryTransport:
    """Headers are broadcast; bodies lie in two segments that all members map.

    After header k the members synchronise once more, when the receivers are done with frame k - 1, whose bucket the
    sender fills next. Order of the group's calls: H0 H1 S0 H2 S1 ... H(END) confirm.
    """

    def __init__(self, group: GlooGroup, buckets: Buckets) -> None:
        self.group = group
        self.buckets = buckets
        self._sent = 0

    def send(self, frame: Frame, deadline: Deadline, what: str) -> None:
        self.group.start_broadcast(frame.header, deadline, what)
        self.group.finish(what)
        self._sent += 1
        if frame.kind != DATA:
            self._sent = 0
        elif self._sent > 1:
            self.group.synchronize(deadline, what)

    def receive(self, turn: int, reader: BucketReader, deadline: Deadline) -> tuple[Header, torch.Tensor]:
        what = _receiving(self.group, reader)
        if turn > 1:
            self.group.synchronize(deadline, what)
        header = _receive_header(self.group, reader, deadline, what)
        return header, self.buckets[turn % 2][: header.body_bytes]

    def confirm(self, deadline: Deadline, what: str) -> None:
        self.group.synchronize(deadline, what)


def _receiving(group: GlooGroup, reader: BucketReader) -> str:
    return f"receiving weights on rank {group.rank} ({reader.position})"


def _receive_header(group: GlooGroup, reader: BucketReader, deadline: Deadline, what: str) -> Header:
    fields = torch.empty(HEADER_FIELDS, dtype=torch.int64)
    group.start_broadcast(fields, deadline, what)
    group.finish(what)
    return reader.header(fields)


class SharedSegments:
    """Two anonymous segments of memory: made by the sender, opened by the receivers through its /proc entry.

    They have no name in any file system, so none is left behind however the processes end, and the size of /dev/shm
    does not matter.
    """

    def __init__(self, paths: Sequence[str], bucket_bytes: int) -> None:
        self.paths = list(paths)
        try:
            first, second = (_map(path, bucket_bytes) for path in paths)
        except OSError as error:
            raise WeightStreamError(
                f"the sender's shared memory {paths} cannot be opened ({error}). Set checkpoint_engine.engine_kwargs."
                "recipe_gloo.shared_memory=false to send through gloo instead."
            ) from error
        self.buckets: Buckets = (first, second)
        self._close: weakref.finalize | None = None

    @classmethod
    def create(cls, bucket_bytes: int) -> SharedSegments:
        """Make the segments; they live as long as this object or a receiver's mapping."""
        descriptors = [os.memfd_create("recipe-weights", os.MFD_CLOEXEC) for _ in range(2)]
        for descriptor in descriptors:
            os.ftruncate(descriptor, bucket_bytes)
        segments = cls([f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors], bucket_bytes)
        segments._close = weakref.finalize(segments, _close, descriptors)
        return segments


def shared_memory_domain() -> str | None:
    """Equal on two processes exactly if one may open the other's /proc entries; None where there are none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.getuid()}"
    except OSError:
        return None


def _map(path: str, nbytes: int) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

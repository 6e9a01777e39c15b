# SPDX-License-Identifier: Apache-2.0
"""The stream format of a weight sync: tensors in, buckets of whole tensors on the wire, the same tensors out.

A stream is a sequence of frames. A frame is a header (six 64-bit integers) and a body: the payload, then a JSON text
that says what the payload holds. There is no pickle, so a receiver runs no code that a sender chose.

- DATA: tensors, of at most a bucket's size together; a tensor larger than that is alone in its frame.
- END: how many tensors and bytes the stream had. Without it a stream is not complete.
- ABORT: the sender's own weights failed; the text says why.

The reader checks magic number, policy version, sequence number, sizes and totals, and names tensor and version in every
error (tests/integration/test_buckets.py). Packing copies into buckets that are used in turns, so that one can be filled
while those before it are on their way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from recipe.async_engine.core.errors import WeightStreamError

MAGIC = 0x52435057  # "RCPW"
DATA, END, ABORT = 1, 2, 3
HEADER_FIELDS = 6
NO_VERSION = -1
ALIGNMENT = 64
TEXT_BYTES = 1 << 18
# Names and shapes of this many tensors fit into TEXT_BYTES with room to spare.
MAX_TENSORS = 512
MAX_NAME_BYTES = 200


@dataclass(frozen=True)
class Entry:
    """One tensor of a frame; it begins ``offset`` bytes into the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass
class Frame:
    """One frame as it travels: ``header`` int64[HEADER_FIELDS], ``body`` uint8[payload + text]."""

    header: torch.Tensor
    body: torch.Tensor


@dataclass
class Totals:
    """What a stream carried."""

    tensors: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Header:
    """What a frame's header says of what follows."""

    kind: int
    payload_bytes: int
    text_bytes: int

    @property
    def body_bytes(self) -> int:
        return self.payload_bytes + self.text_bytes


class Buckets:
    """Memory for frames, used in turns.

    Args:
        memory: uint8 buffers.
        grows: whether one that is too small for a frame is replaced, and what lay in it is lost.
    """

    def __init__(self, memory: Sequence[torch.Tensor], grows: bool = False) -> None:
        self._memory = list(memory)
        self._grows = grows

    @classmethod
    def growing(cls) -> Buckets:
        """Two, each as large as the largest frame that lay in it."""
        return cls([torch.empty(0, dtype=torch.uint8)] * 2, grows=True)

    def room(self, turn: int, nbytes: int) -> torch.Tensor:
        """uint8[nbytes], for the frame of this turn; raises WeightStreamError if there is not as much."""
        place = turn % len(self._memory)
        largest = self._memory[place].numel()
        if nbytes > largest:
            if not self._grows:
                raise WeightStreamError(f"a frame of {nbytes} bytes does not fit a bucket, of at most {largest}")
            try:
                self._memory[place] = torch.empty(nbytes, dtype=torch.uint8)
            except RuntimeError as error:
                raise WeightStreamError(f"there is no memory for a frame of {nbytes} bytes: {error}") from None
        return self._memory[place][:nbytes]


class BucketWriter:
    """Packs a stream of named tensors into frames, for one sync.

    Args:
        buckets: where they are packed.
        bucket_bytes: of tensors in a frame, unless one alone has more.
        version: the policy version of the weights, or None.

    A frame that `frames` yielded lies in one of the buckets: it must have been sent before the generator comes round to
    that bucket again; with two, before the frame after next is asked for.
    """

    def __init__(self, buckets: Buckets, bucket_bytes: int, version: int | None) -> None:
        self._buckets = buckets
        self._bucket_bytes = bucket_bytes
        self._version = NO_VERSION if version is None else version
        self._sequence = 0
        self.totals = Totals()

    def frames(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Frame]:
        """Yield the DATA frames of ``weights`` and the END frame."""
        entries: list[Entry] = []
        used = 0
        for name, tensor in weights:
            if len(name.encode()) > MAX_NAME_BYTES:
                raise WeightStreamError(f"tensor name {name!r} is longer than {MAX_NAME_BYTES} bytes")
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            self.totals.tensors += 1
            self.totals.nbytes += flat.numel()
            offset = -(-used // ALIGNMENT) * ALIGNMENT
            if entries and (offset + flat.numel() > self._bucket_bytes or len(entries) == MAX_TENSORS):
                yield self._data_frame(entries, used)
                entries, offset = [], 0
            used = offset + flat.numel()
            _copy_bytes(self._bucket(max(used, self._bucket_bytes))[offset:used], flat)
            entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            if used >= self._bucket_bytes:
                # It leaves at once: the next tensor may have to be gathered first.
                yield self._data_frame(entries, used)
                entries, used = [], 0
        if entries:
            yield self._data_frame(entries, used)
        yield self._frame(END, 0, asdict(self.totals))

    def abort(self, reason: str) -> Frame:
        """The frame that ends a stream whose weights cannot be had. Uses the next bucket, as any frame does."""
        return self._frame(ABORT, 0, {"reason": reason[:1000]})

    def _bucket(self, payload_bytes: int) -> torch.Tensor:
        return self._buckets.room(self._sequence, payload_bytes + TEXT_BYTES)

    def _data_frame(self, entries: list[Entry], payload_bytes: int) -> Frame:
        return self._frame(DATA, payload_bytes, [list(asdict(entry).values()) for entry in entries])

    def _frame(self, kind: int, payload_bytes: int, content: Any) -> Frame:
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        body = self._bucket(payload_bytes)[: payload_bytes + len(text)]
        body[payload_bytes:].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        fields = [MAGIC, kind, self._version, self._sequence, payload_bytes, len(text)]
        self._sequence += 1
        return Frame(torch.tensor(fields, dtype=torch.int64), body)


class BucketReader:
    """Checks a stream frame by frame and takes its tensors out, for one sync.

    Args:
        version: the policy version that is expected, or None for any.
    """

    def __init__(self, version: int | None) -> None:
        self._version = version
        self._sequence = 0
        self._last_name = "none yet"
        self.totals = Totals()

    @property
    def position(self) -> str:
        """Where in the stream an error happened, for its message."""
        version = "any" if self._version is None else self._version
        return f"version {version}, frame {self._sequence}, last tensor: {self._last_name}"

    def header(self, fields: list[int]) -> Header:
        """Parse a header; raises WeightStreamError if it is not the one that must come now."""
        magic, kind, version, sequence, payload_bytes, text_bytes = fields
        if magic != MAGIC or kind not in (DATA, END, ABORT) or payload_bytes < 0 or not 0 <= text_bytes <= TEXT_BYTES:
            raise WeightStreamError(f"what arrived is not a weight frame ({self.position})")
        if self._version is not None and version != NO_VERSION and version != self._version:
            raise WeightStreamError(
                f"the sender sends version {version}, this receiver was told to take version {self._version}"
            )
        if sequence != self._sequence:
            raise WeightStreamError(f"frame {sequence} arrived out of turn ({self.position})")
        self._sequence += 1
        return Header(kind, payload_bytes, text_bytes)

    def tensors(self, header: Header, body: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of this frame. They are views of a buffer that will be used again.

        Raises:
            WeightStreamError: the frame contradicts itself or those before it, or the sender gave up.
        """
        content = json.loads(bytes(body[header.payload_bytes : header.body_bytes].numpy()))
        if header.kind == ABORT:
            raise WeightStreamError(f"the sender gave up: {content['reason']} ({self.position})")
        if header.kind == END:
            self._check_end(content)
            return
        payload = body[: header.payload_bytes]
        for fields in content:
            entry = Entry(*fields)
            tensor = self._tensor(entry, payload)
            self.totals.tensors += 1
            self.totals.nbytes += tensor.nbytes
            self._last_name = entry.name
            yield entry.name, tensor

    def _tensor(self, entry: Entry, payload: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightStreamError(f"tensor {entry.name!r} has the unknown dtype {entry.dtype!r} ({self.position})")
        end = entry.offset + torch.Size(entry.shape).numel() * dtype.itemsize
        if not 0 <= entry.offset <= end <= payload.numel():
            raise WeightStreamError(f"tensor {entry.name!r} does not lie in its frame ({self.position})")
        return payload[entry.offset : end].view(dtype).view(tuple(entry.shape))

    def _check_end(self, announced: dict[str, int]) -> None:
        if asdict(self.totals) != announced:
            raise WeightStreamError(f"the sender sent {announced}, but {asdict(self.totals)} arrived ({self.position})")


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy uint8 tensors of one length, ``target`` in host memory. A large one passes the caches by with NumPy."""
    if source.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)

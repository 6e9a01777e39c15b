# SPDX-License-Identifier: Apache-2.0
"""The stream format of a weight sync: the sender packs tensors into frames in buckets, and receivers unpack them.

A bucket is a buffer in memory; several are used in rotation, so that one can be filled while earlier ones are being
sent. A stream is a sequence of frames. A frame has a header (six 64-bit integers) and a body: the payload, then a JSON
text that describes the payload. Nothing is pickled, so a sender cannot make a receiver run code.

- A DATA frame has tensors of at most a bucket's size in total; a tensor larger than that is alone in its frame.
- The END frame has the numbers of tensors and bytes in the stream. A stream without it is incomplete.
- An ABORT frame means that the sender could not produce its weights; the text has the reason.

The reader checks magic number, policy version, sequence number, sizes and totals, and names tensor and version in every
error (tests/integration/test_buckets.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from recipe.async_engine.core.errors import WeightStreamError

MAGIC = 0x52435057  # The four bytes spell "RCPW".
DATA, END, ABORT = 1, 2, 3
HEADER_FIELDS = 6
NO_VERSION = -1
ALIGNMENT = 64
TEXT_BYTES = 1 << 18
# Largest number of tensors in a frame, and longest name of a tensor. Within these limits, the description of the
# tensors always fits into TEXT_BYTES.
MAX_TENSORS = 512
MAX_NAME_BYTES = 200


@dataclass(frozen=True)
class Entry:
    """The description of one tensor of a frame. The tensor's data begin ``offset`` bytes into the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass
class Frame:
    """A frame in the form in which it is sent: ``header`` is int64[HEADER_FIELDS], ``body`` uint8[payload + text]."""

    header: torch.Tensor
    body: torch.Tensor


@dataclass(frozen=True)
class Header:
    """The kind of a frame (DATA, END or ABORT) and the sizes of its body's two parts, from the frame's header."""

    kind: int
    payload_bytes: int
    text_bytes: int

    @property
    def body_bytes(self) -> int:
        return self.payload_bytes + self.text_bytes


class Buckets:
    """Buffers for frames, which are used in rotation.

    Args:
        memory: the buffers, uint8.
        grows: whether a buffer that is too small for a frame is replaced by a larger one; its contents are then lost.
    """

    def __init__(self, memory: Sequence[torch.Tensor], grows: bool = False) -> None:
        self._memory = list(memory)
        self._grows = grows

    @classmethod
    def growing(cls) -> Buckets:
        """Return two buckets that are empty at first, and grow to the size of the largest frame."""
        return cls([torch.empty(0, dtype=torch.uint8)] * 2, grows=True)

    def room(self, turn: int, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` bytes of the bucket for frame number ``turn``, as uint8.

        Raises:
            WeightStreamError: the bucket is too small, or there is no memory to enlarge it.
        """
        place = turn % len(self._memory)
        largest = self._memory[place].numel()
        if nbytes > largest:
            if not self._grows:
                raise WeightStreamError(f"a frame of {nbytes} bytes does not fit into a bucket of {largest} bytes")
            try:
                self._memory[place] = torch.empty(nbytes, dtype=torch.uint8)
            except RuntimeError as error:
                raise WeightStreamError(f"there is no memory for a frame of {nbytes} bytes: {error}") from None
        return self._memory[place][:nbytes]


class BucketWriter:
    """Packs a stream of named tensors into frames, for one sync.

    Args:
        buckets: buckets into which tensors are packed.
        bucket_bytes: largest total size in bytes of the tensors in a frame, unless a single tensor is larger.
        version: policy version of the weights, or None.

    A frame that `frames` yields is a view of a bucket. It must have been sent before the generator uses that bucket
    again: with two buckets, frame n must have been sent before frame n + 2 is requested.
    """

    def __init__(self, buckets: Buckets, bucket_bytes: int, version: int | None) -> None:
        self._buckets = buckets
        self._bucket_bytes = bucket_bytes
        self._version = NO_VERSION if version is None else version
        self._sequence = 0
        self.tensors = self.nbytes = 0

    def frames(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Frame]:
        """Yield DATA frames with all tensors of ``weights``, and then the END frame."""
        entries: list[Entry] = []
        used = 0
        for name, tensor in weights:
            if len(name.encode()) > MAX_NAME_BYTES:
                raise WeightStreamError(f"tensor name {name!r} is longer than {MAX_NAME_BYTES} bytes")
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            self.tensors, self.nbytes = self.tensors + 1, self.nbytes + flat.numel()
            offset = -(-used // ALIGNMENT) * ALIGNMENT
            if entries and (offset + flat.numel() > self._bucket_bytes or len(entries) == MAX_TENSORS):
                yield self._data_frame(entries, used)
                entries, offset = [], 0
            used = offset + flat.numel()
            _copy_bytes(self._bucket(max(used, self._bucket_bytes))[offset:used], flat)
            entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            if used >= self._bucket_bytes:
                # Send a full bucket now. If it waited for the next tensor, which may first have to be gathered, time
                # would be lost.
                yield self._data_frame(entries, used)
                entries, used = [], 0
        if entries:
            yield self._data_frame(entries, used)
        yield self._frame(END, 0, [self.tensors, self.nbytes])

    def abort(self, reason: str) -> Frame:
        """Return the ABORT frame, which ends a stream after an error. It uses the next bucket, like any other frame."""
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
    """Checks the frames of one stream in their order and extracts the tensors.

    Args:
        version: expected policy version, or None to accept any.
    """

    def __init__(self, version: int | None) -> None:
        self._version = version
        self._sequence = 0
        self._last_name = "none yet"
        self._arrived = [0, 0]

    @property
    def position(self) -> str:
        """A text for error messages that says how far the stream has been read."""
        version = "any" if self._version is None else self._version
        return f"version {version}, frame {self._sequence}, last tensor: {self._last_name}"

    def header(self, fields: list[int]) -> Header:
        """Parse the next frame's header; raise WeightStreamError if it is not the expected one."""
        magic, kind, version, sequence, payload_bytes, text_bytes = fields
        if magic != MAGIC or kind not in (DATA, END, ABORT) or payload_bytes < 0 or not 0 <= text_bytes <= TEXT_BYTES:
            raise WeightStreamError(f"the received header is not a weight frame's ({self.position})")
        if self._version is not None and version != NO_VERSION and version != self._version:
            raise WeightStreamError(
                f"the sender sends version {version}, but this receiver must take version {self._version}"
            )
        if sequence != self._sequence:
            raise WeightStreamError(f"frame {sequence} arrived out of turn ({self.position})")
        self._sequence += 1
        return Header(kind, payload_bytes, text_bytes)

    def tensors(self, header: Header, body: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for each tensor of a frame; the tensors are views of a buffer that will be reused.

        Raises:
            WeightStreamError: the sender aborted, a tensor is not within the frame, or the totals in the END frame
                differ from what arrived.
        """
        content = json.loads(bytes(body[header.payload_bytes : header.body_bytes].numpy()))
        if header.kind == ABORT:
            raise WeightStreamError(f"the sender gave up: {content['reason']} ({self.position})")
        if header.kind == END:
            if content != self._arrived:
                raise WeightStreamError(
                    f"the sender sent {content} (tensors, bytes), but {self._arrived} arrived ({self.position})"
                )
            return
        payload = body[: header.payload_bytes]
        for fields in content:
            entry = Entry(*fields)
            tensor = self._tensor(entry, payload)
            self._arrived = [self._arrived[0] + 1, self._arrived[1] + tensor.nbytes]
            self._last_name = entry.name
            yield entry.name, tensor

    def _tensor(self, entry: Entry, payload: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightStreamError(f"tensor {entry.name!r} has the unknown dtype {entry.dtype!r} ({self.position})")
        end = entry.offset + torch.Size(entry.shape).numel() * dtype.itemsize
        if not 0 <= entry.offset <= end <= payload.numel():
            raise WeightStreamError(f"tensor {entry.name!r} is not within its frame ({self.position})")
        return payload[entry.offset : end].view(dtype).view(tuple(entry.shape))


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a uint8 tensor to host memory of the same length.

    Tensors in host memory are copied by NumPy, because NumPy bypasses the CPU caches for large tensors.
    """
    if source.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)

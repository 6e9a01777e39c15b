# SPDX-License-Identifier: Apache-2.0
"""The stream format of a weight sync: tensors in, fixed-size buckets on the wire, the same tensors out.

A stream is a sequence of frames. A frame is a header (eight 64-bit integers) and a body: the payload, then a JSON text
that says what the payload holds. There is no pickle, so a receiver runs no code that a sender chose.

- DATA: pieces of tensors. A tensor larger than a bucket is split into pieces, in order, without another between them.
- END: how many tensors and bytes the stream had. Without it a stream is not complete.
- ABORT: the sender's own weights failed; the text says why.

The reader checks magic number, policy version, sequence number, sizes and totals, and names tensor and version in every
error (tests/integration/test_gloo_engine.py). Packing copies into buckets that are used in turns, so that one
can be filled while those before it are on their way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from recipe.async_engine.core.errors import RecipeError

MAGIC = 0x52435057  # "RCPW"
DATA, END, ABORT = 1, 2, 3
HEADER_FIELDS = 6
NO_VERSION = -1
ALIGNMENT = 64
TEXT_BYTES = 1 << 18
# Names and shapes of this many pieces fit into TEXT_BYTES with room to spare.
MAX_PIECES = 512
MAX_NAME_BYTES = 200


class WeightStreamError(RecipeError):
    """A weight sync was cut off, timed out, or carried something other than what was expected."""


@dataclass(frozen=True)
class Piece:
    """Where a part of one tensor lies in a payload. All sizes are bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
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


class BucketWriter:
    """Packs a stream of named tensors into frames, for one sync.

    Args:
        buckets: uint8 buffers of equal size, ``capacity + TEXT_BYTES`` bytes each, used in turns.
        version: the policy version of the weights, or None.

    A frame that `frames` yielded lies in one of the buckets: it must have been sent before the generator comes round to
    that bucket again; with two, before the frame after next is asked for.
    """

    def __init__(self, buckets: tuple[torch.Tensor, ...], version: int | None) -> None:
        self._buckets = buckets
        self._capacity = buckets[0].numel() - TEXT_BYTES
        self._version = NO_VERSION if version is None else version
        self._sequence = 0
        self.totals = Totals()

    def frames(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Frame]:
        """Yield the DATA frames of ``weights`` and the END frame."""
        pieces: list[Piece] = []
        used = 0
        for name, tensor in weights:
            if len(name.encode()) > MAX_NAME_BYTES:
                raise WeightStreamError(f"tensor name {name!r} is longer than {MAX_NAME_BYTES} bytes")
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            self.totals.tensors += 1
            self.totals.nbytes += flat.numel()
            begin = 0
            while True:
                offset = -(-used // ALIGNMENT) * ALIGNMENT
                room = self._capacity - offset
                if pieces and (room < min(flat.numel(), self._capacity) or len(pieces) == MAX_PIECES):
                    yield self._data_frame(pieces, used)
                    pieces, used = [], 0
                    continue
                size = min(room, flat.numel() - begin)
                self._bucket[offset : offset + size].copy_(flat[begin : begin + size])
                dtype = str(tensor.dtype).removeprefix("torch.")
                pieces.append(Piece(name, dtype, tuple(tensor.shape), begin, size, offset))
                used = offset + size
                begin += size
                if begin == flat.numel():
                    break
        if pieces:
            yield self._data_frame(pieces, used)
        yield self._frame(END, 0, asdict(self.totals))

    def abort(self, reason: str) -> Frame:
        """The frame that ends a stream whose weights cannot be had. Uses the next bucket, as any frame does."""
        return self._frame(ABORT, 0, {"reason": reason[:1000]})

    @property
    def _bucket(self) -> torch.Tensor:
        return self._buckets[self._sequence % len(self._buckets)]

    def _data_frame(self, pieces: list[Piece], payload_bytes: int) -> Frame:
        return self._frame(DATA, payload_bytes, [list(asdict(piece).values()) for piece in pieces])

    def _frame(self, kind: int, payload_bytes: int, content: Any) -> Frame:
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        body = self._bucket[: payload_bytes + len(text)]
        body[payload_bytes:].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        fields = [MAGIC, kind, self._version, self._sequence, payload_bytes, len(text)]
        self._sequence += 1
        return Frame(torch.tensor(fields, dtype=torch.int64), body)


class BucketReader:
    """Checks a stream frame by frame and puts its tensors together again, for one sync.

    Args:
        version: the policy version that is expected, or None for any.
        capacity: bytes of the receiver's buffers.
        assembly: a buffer of an earlier sync, for tensors larger than a bucket, or None.
    """

    def __init__(self, version: int | None, capacity: int, assembly: torch.Tensor | None = None) -> None:
        self._version = version
        self._capacity = capacity
        self._sequence = 0
        self._partial: Piece | None = None
        self._last_name = "none yet"
        self.assembly = assembly
        self.totals = Totals()

    @property
    def position(self) -> str:
        """Where in the stream an error happened, for its message."""
        version = "any" if self._version is None else self._version
        return f"version {version}, frame {self._sequence}, last complete tensor: {self._last_name}"

    def header(self, fields: list[int]) -> Header:
        """Parse a header; raises WeightStreamError if it is not the one that must come now."""
        magic, kind, version, sequence, payload_bytes, text_bytes = fields
        if magic != MAGIC or kind not in (DATA, END, ABORT):
            raise WeightStreamError(f"what arrived is not a weight frame ({self.position})")
        if self._version is not None and version != NO_VERSION and version != self._version:
            raise WeightStreamError(
                f"the sender sends version {version}, this receiver was told to take version {self._version}"
            )
        if sequence != self._sequence:
            raise WeightStreamError(f"frame {sequence} arrived out of turn ({self.position})")
        header = Header(kind, payload_bytes, text_bytes)
        if payload_bytes < 0 or text_bytes < 0 or header.body_bytes > self._capacity:
            raise WeightStreamError(
                f"a frame of {header.body_bytes} bytes does not fit this receiver's bucket of {self._capacity} bytes "
                f"({self.position}). Sender and receivers must have the same update_weights_bucket_megabytes."
            )
        self._sequence += 1
        return header

    def tensors(self, header: Header, body: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are complete with this frame. They are views of a buffer that will be used again.

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
            piece = Piece(*fields)
            whole = self._put(piece, payload)
            if whole is not None:
                self.totals.tensors += 1
                self.totals.nbytes += whole.numel()
                self._last_name = piece.name
                yield piece.name, whole.view(getattr(torch, piece.dtype)).view(tuple(piece.shape))

    def _put(self, piece: Piece, payload: torch.Tensor) -> torch.Tensor | None:
        """Take a piece and return the bytes of its tensor, once they are complete."""
        dtype = getattr(torch, piece.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightStreamError(f"tensor {piece.name!r} has the unknown dtype {piece.dtype!r} ({self.position})")
        total = torch.Size(piece.shape).numel() * dtype.itemsize
        if piece.offset + piece.nbytes > payload.numel() or piece.begin + piece.nbytes > total:
            raise WeightStreamError(f"tensor {piece.name!r} does not have the announced size ({self.position})")
        due = 0 if self._partial is None else self._partial.begin + self._partial.nbytes
        if piece.begin != due or (self._partial is not None and piece.name != self._partial.name):
            missing = piece.name if self._partial is None else self._partial.name
            raise WeightStreamError(f"a part of tensor {missing!r} is missing ({self.position})")
        part = payload[piece.offset : piece.offset + piece.nbytes]
        if piece.nbytes == total:
            return part
        if self.assembly is None or self.assembly.numel() < total:
            self.assembly = torch.empty(total, dtype=torch.uint8)
        self.assembly[piece.begin : piece.begin + piece.nbytes].copy_(part)
        if piece.begin + piece.nbytes < total:
            self._partial = piece
            return None
        self._partial = None
        return self.assembly[:total]

    def _check_end(self, announced: dict[str, int]) -> None:
        if self._partial is not None:
            raise WeightStreamError(f"the stream ended within tensor {self._partial.name!r} ({self.position})")
        if asdict(self.totals) != announced:
            raise WeightStreamError(f"the sender sent {announced}, but {asdict(self.totals)} arrived ({self.position})")

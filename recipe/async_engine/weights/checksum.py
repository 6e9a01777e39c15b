# SPDX-License-Identifier: Apache-2.0
"""A checksum of weights, which the sender and each receiving engine compute, on any device.

Contract: the checksum depends on each tensor's name, shape, dtype and bits, but not on the order of the tensors. It
changes if a bit changes, or if two tensors or two blocks of `BLOCK_WORDS` words exchange their contents. Tensors
without elements are ignored, since not every checkpoint engine transfers them. Each tensor is read once, with about one
device operation and about 1% of its size as workspace. Only `value` waits for the device. The checksum detects
accidents, not forgeries. Shown by tests/integration/test_checksum.py.

`torch.hash_tensor` is not used: it combines words by exclusive or, so two ones give the same result as two zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

WORD_BYTES = 8
BLOCK_WORDS = 512
BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES
LARGEST = 1 << 17
"""Largest number of block sums in one allocation. Such an allocation takes one mebibyte."""
CHECKSUM, VERSION = "sent checksum", "sent version"
"""Keys in a sender's metrics for the checksum and the version of the weights that it sent."""


class Rows:
    """A preallocated tensor of integers on one device. `take` returns its next unused rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.used = rows, 0

    def take(self, count: int) -> torch.Tensor:
        begin, self.used = self.used, self.used + count
        return self.rows[begin : self.used]

    def has(self, count: int, device: torch.device) -> bool:
        return self.rows.device == device and self.used + count <= len(self.rows)


@dataclass
class Tensor:
    """State of the checksum of one tensor.

    ``runs`` says where the sums of its blocks are: (index of a `Rows`, first row, number of rows). ``blocks`` is the
    number of its complete blocks.
    """

    what: str
    blocks: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    last: int | None = None
    """Index of the tensor's last block among the incomplete blocks of all tensors; None if that block is complete."""


class StreamChecksum:
    """Computes the checksum of a stream of tensors.

    A tensor is read as 8-byte integers: a CPU can sum these as fast as it reads memory, but would need thirty times as
    long for smaller integers. The integers of each block of the tensor are summed. The tensor's checksum is the sum of
    these block sums, each multiplied by 2 * (index of the block) + 1. These factors are odd, because multiplication by
    an even factor would lose the highest bit of a block sum by overflow.

    When a tensor is added, the device sums its complete blocks, and copies its last block if that is incomplete.
    `value` combines the block sums of many tensors at once.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._sums: list[Rows] = []
        self._last: list[Rows] = []
        self._incomplete = 0
        self._value: str | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._begin(name, tensor)
            self._add(tensor.detach().flatten().view(torch.uint8))

    def add_chunk(self, meta: Any, data: torch.Tensor) -> None:
        """Add the next chunk of a tensor that verl has split into chunks.

        ``meta.chunk_offset`` is the position of the chunk in the tensor, in bytes. It must be a multiple of
        `BLOCK_BYTES`.
        """
        assert meta.chunk_offset % BLOCK_BYTES == 0, "only a tensor's last block may be incomplete"
        if not meta.chunk_offset:
            self._begin(meta.name, meta)
        self._add(data)

    def _begin(self, name: str, like: Any) -> None:
        self._tensors.append(Tensor(f"{name} {tuple(like.shape)} {like.dtype}"))
        self._value = None

    def _add(self, data: torch.Tensor) -> None:
        if data.storage_offset() % WORD_BYTES:
            data = data.clone()
        tensor, count = self._tensors[-1], len(data) // BLOCK_BYTES
        if count:
            sums = self._room(self._sums, count, data.device, ())
            torch.sum(data[: count * BLOCK_BYTES].view(torch.int64).view(-1, BLOCK_WORDS), 1, out=sums.take(count))
            tensor.runs.append((len(self._sums) - 1, sums.used - count, count))
            tensor.blocks += count
        if count * BLOCK_BYTES < len(data):
            last = self._room(self._last, 1, data.device, (BLOCK_WORDS,)).take(1)
            last.view(torch.uint8)[0, : len(data) - count * BLOCK_BYTES] = data[count * BLOCK_BYTES :]
            tensor.last, self._incomplete = self._incomplete, self._incomplete + 1

    def _room(self, among: list[Rows], count: int, device: torch.device, shape: tuple[int, ...]) -> Rows:
        """Return the last `Rows` in ``among`` if it has ``count`` unused rows; otherwise append and return a new one.

        Each new `Rows` is twice as large as the one before, up to a limit, but has at least ``count`` rows.
        """
        if not among or not among[-1].has(count, device):
            rows = min(2 * len(among[-1].rows), LARGEST >> 8 if shape else LARGEST) if among else 2 if shape else 512
            make = torch.zeros if shape else torch.empty
            among.append(Rows(make((max(rows, count), *shape), dtype=torch.int64, device=device)))
        return among[-1]

    async def watching(self, weights: Any) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Add each tensor of ``weights``, a sync or async iterator of (name, tensor), and then yield it."""
        from verl.workers.rollout.utils import ensure_async_iterator

        async for name, tensor in ensure_async_iterator(weights):
            self.add(name, tensor)
            yield name, tensor

    def passing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor at once, and add it to the checksum when the next one is requested."""
        for name, tensor in weights:
            yield name, tensor
            self.add(name, tensor)

    def value(self) -> str:
        """Return the checksum as 16 hexadecimal digits."""
        if self._value is None:
            numbers = self._numbers() if self._tensors else []
            total = sum(
                zlib.crc32(f"{tensor.what} {number}".encode())
                for tensor, number in zip(self._tensors, numbers, strict=True)
            )
            self._value = f"{(total << 32 | len(self._tensors)) % (1 << 64):016x}"
        return self._value

    def _numbers(self) -> list[int]:
        """Return each tensor's checksum as a signed 8-byte integer."""
        ends: list[list[int]] = [[] for _ in self._sums]
        for tensor in self._tensors:
            for rows, begin, count in tensor.runs:
                ends[rows] += [begin, begin + count]
        read = [rows.rows[: rows.used].sum(1) for rows in self._last]
        for row, places in zip(self._sums, ends, strict=True):
            sums = torch.nn.functional.pad(row.rows[: row.used], (1, 0))
            weighted = sums * (2 * torch.arange(len(sums), device=sums.device) - 1)
            at = torch.tensor(places, device="cpu").to(sums.device, non_blocking=True)
            read += [sums.cumsum(0)[at], weighted.cumsum(0)[at]]
        # All values are read in one transfer, because each transfer waits for the device.
        values = iter(torch.cat([part.to(read[0].device) for part in read]).tolist())
        last = [next(values) for _ in range(self._incomplete)]
        plain_and_weighted = [([next(values) for _ in places], [next(values) for _ in places]) for places in ends]
        differences = [
            iter([(plain[i + 1] - plain[i], weighted[i + 1] - weighted[i]) for i in range(0, len(plain), 2)])
            for plain, weighted in plain_and_weighted
        ]
        return [_number(tensor, differences, last) for tensor in self._tensors]


def _number(tensor: Tensor, differences: list[Iterator[tuple[int, int]]], last: list[int]) -> int:
    """Return one tensor's checksum.

    ``differences`` has an iterator for each `Rows`, which yields a pair for each entry of `Tensor.runs` in this `Rows`:
    the sum of the entry's rows, and their weighted sum, in which each row is multiplied by 2 * (index of the row) + 1.
    ``last`` has the sums of the incomplete last blocks of all tensors.
    """
    total = place = 0
    for rows, begin, count in tensor.runs:
        plain, weighted = next(differences[rows])
        total, place = total + weighted - 2 * (begin - place) * plain, place + count
    if tensor.last is not None:
        total += (2 * tensor.blocks + 1) * last[tensor.last]
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


class SummedSender:
    """Wraps the checkpoint engine of the sending trainer rank, to report checksum and version of the weights sent.

    `send_weights` adds these two to its metrics as `CHECKSUM` and `VERSION`, and the publisher compares them with what
    each receiver reports. All other calls go to `engine` unchanged.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Send the weights with the wrapped engine; return its metrics, checksum and version included."""
        checksum = StreamChecksum()
        if getattr(self.engine, "sums_what_it_sends", False):
            metrics = await self.engine.send_weights(weights, global_steps=global_steps)
        else:
            metrics = await self.engine.send_weights(checksum.passing(weights), global_steps=global_steps)
        return {CHECKSUM: checksum.value(), **(metrics or {}), VERSION: global_steps}

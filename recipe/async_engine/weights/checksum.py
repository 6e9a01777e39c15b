# SPDX-License-Identifier: Apache-2.0
"""A checksum of weights, taken where they are sent and where an engine takes them, on whatever device they are.

Contract: the same for the same names, shapes, types and bits, in whatever order the tensors come; another one if a bit
differs, or if blocks of `BLOCK_WORDS` words, or whole tensors, changed places. Tensors without elements do not count,
since not every checkpoint engine carries them. It reads each tensor once, asks a device for about one operation a
tensor, needs a hundredth of its memory, and waits for the device once, at the end. It finds accidents, not forgeries.
Shown by tests/integration/test_checksum.py.

`torch.hash_tensor` would be the library for it, but its exclusive or takes ones, twice, for zeros.
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
"""Of blocks whose sums lie in one piece of memory, a mebibyte."""
CHECKSUM, VERSION = "sent checksum", "sent version"
"""What a sender reports beside its metrics."""


class Rows:
    """Rows of numbers on one device, handed out in order."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.used = rows, 0

    def take(self, count: int) -> torch.Tensor:
        begin, self.used = self.used, self.used + count
        return self.rows[begin : self.used]

    def has(self, count: int, device: torch.device) -> bool:
        return self.rows.device == device and self.used + count <= len(self.rows)


@dataclass
class Tensor:
    """What is known of one: ``runs`` are the sums of its whole blocks, as (of which rows, from where, how many)."""

    what: str
    blocks: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    last: int | None = None
    """Which of the incomplete blocks is its last."""


class StreamChecksum:
    """See the module's contract.

    A tensor's number is the sum of its blocks, each the sum of its bits as integers, weighted by their places. A
    processor sums integers of 8 bytes as fast as it reads them, and smaller ones thirty times slower. Weights are odd,
    so that the highest bit of a word counts in every block.

    A device is asked to sum the whole blocks of a tensor, and to put its last one aside where it is incomplete: once a
    tensor in all but odd sizes. What puts these sums together comes at the end, for many tensors at once.
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
        """The bytes of a tensor from ``meta.chunk_offset`` on, a multiple of `BLOCK_BYTES`, as verl splits them."""
        assert meta.chunk_offset % BLOCK_BYTES == 0, "blocks are whole but for a tensor's last"
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
        """Where so many rows have room; each is twice as large as the one before it, up to `LARGEST`."""
        if not among or not among[-1].has(count, device):
            rows = min(2 * len(among[-1].rows), LARGEST >> 8 if shape else LARGEST) if among else 2 if shape else 512
            make = torch.zeros if shape else torch.empty
            among.append(Rows(make((max(rows, count), *shape), dtype=torch.int64, device=device)))
        return among[-1]

    async def watching(self, weights: Any) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """The weights, an iterator of (name, tensor) of either kind, added as they pass."""
        from verl.workers.rollout.utils import ensure_async_iterator

        async for name, tensor in ensure_async_iterator(weights):
            self.add(name, tensor)
            yield name, tensor

    def passing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """As `watching`, of a plain iterable. A tensor is added when it has passed: who waits for it comes first."""
        for name, tensor in weights:
            yield name, tensor
            self.add(name, tensor)

    def value(self) -> str:
        """16 hexadecimal digits."""
        if self._value is None:
            numbers = self._numbers() if self._tensors else []
            total = sum(
                zlib.crc32(f"{tensor.what} {number}".encode())
                for tensor, number in zip(self._tensors, numbers, strict=True)
            )
            self._value = f"{(total << 32 | len(self._tensors)) % (1 << 64):016x}"
        return self._value

    def _numbers(self) -> list[int]:
        """Of each tensor, as an integer of 8 bytes with its sign."""
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
        # Read from a device together: each reading waits for it.
        values = iter(torch.cat([part.to(read[0].device) for part in read]).tolist())
        last = [next(values) for _ in range(self._incomplete)]
        plain_and_weighted = [([next(values) for _ in places], [next(values) for _ in places]) for places in ends]
        differences = [
            iter([(plain[i + 1] - plain[i], weighted[i + 1] - weighted[i]) for i in range(0, len(plain), 2)])
            for plain, weighted in plain_and_weighted
        ]
        return [_number(tensor, differences, last) for tensor in self._tensors]


def _number(tensor: Tensor, differences: list[Iterator[tuple[int, int]]], last: list[int]) -> int:
    """``differences``: of the runs of each rows, in order: of their sums, and of these weighted by 2 * row + 1."""
    total = place = 0
    for rows, begin, count in tensor.runs:
        plain, weighted = next(differences[rows])
        total, place = total + weighted - 2 * (begin - place) * plain, place + count
    if tensor.last is not None:
        total += (2 * tensor.blocks + 1) * last[tensor.last]
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


class SummedSender:
    """The checkpoint engine of the trainer rank that sends, which also reports what it has sent.

    It is `engine` in all else. To the metrics of `send_weights` it adds `CHECKSUM` and `VERSION`, by which the
    publisher knows what every receiver must have.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """As the engine's."""
        checksum = StreamChecksum()
        if getattr(self.engine, "sums_what_it_sends", False):
            metrics = await self.engine.send_weights(weights, global_steps=global_steps)
        else:
            metrics = await self.engine.send_weights(checksum.passing(weights), global_steps=global_steps)
        return {CHECKSUM: checksum.value(), **(metrics or {}), VERSION: global_steps}

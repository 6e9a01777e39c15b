# SPDX-License-Identifier: Apache-2.0
"""A checksum of weights, taken where they are sent and where an engine takes them, on whatever device they are.

Contract: the same for the same names, shapes, types and bits, in whatever order the tensors come; another one if a bit
differs, or if blocks of `BLOCK_WORDS` words, or whole tensors, changed places. Tensors without elements do not count,
since not every checkpoint engine carries them. It reads each tensor once, needs a hundredth of its memory, and waits
for the device once, at the end. It finds accidents, not forgeries. Shown by tests/integration/test_checksum.py.

`torch.hash_tensor` would be the library for it, but its exclusive or takes ones, twice, for zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import torch

WORD_BYTES = 8
BLOCK_WORDS = 512
BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES
CHECKSUM, VERSION = "sent checksum", "sent version"
"""What a sender reports beside its metrics."""


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """int64 (), on the tensor's device: sums of its blocks' bits as integers, weighted by the blocks' places.

    A processor sums integers of 8 bytes as fast as it reads them, and smaller ones thirty times slower. Weights are
    odd, so that the highest bit of a word counts in every block.
    """
    data = tensor.detach().flatten().view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
    sums = data[:whole].view(torch.int64).view(-1, BLOCK_WORDS).sum(1)
    if whole < len(data):
        last = data.new_zeros(BLOCK_BYTES)
        last[: len(data) - whole] = data[whole:]
        sums = torch.cat((sums, last.view(torch.int64).sum()[None]))
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()


class StreamChecksum:
    """See the module's contract."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, torch.Tensor]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        self._parts.append((f"{name} {tuple(tensor.shape)} {tensor.dtype}", sum_of_bits(tensor)))

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
        if not self._parts:
            return f"{0:016x}"
        # Read from a device together: each reading waits for it.
        sums = torch.stack([bits.to(self._parts[0][1].device) for _, bits in self._parts]).tolist()
        total = sum(zlib.crc32(f"{what} {bits}".encode()) for (what, _), bits in zip(self._parts, sums, strict=True))
        return f"{(total << 32 | len(self._parts)) % (1 << 64):016x}"


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
        metrics = await self.engine.send_weights(checksum.passing(weights), global_steps=global_steps)
        return {**(metrics or {}), CHECKSUM: checksum.value(), VERSION: global_steps}

# SPDX-License-Identifier: Apache-2.0
"""Weights as what changed of them since a version that sender and receiver both have.

Two filters of a stream of named tensors, above any checkpoint engine: `encode` before it is sent, `Decoder` (or
`decode`) where it arrives. What comes out is bit for bit what went in, NaN, their payloads and -0.0 included.

- `HEADER` comes first: the base that the stream is made against, by version and checksum, or none; then everything is
  sent in full.
- A tensor of which few values changed is sent under `PACKED` and its name: the places of those values, as gaps, and the
  values. Others are sent in full under their name, where that is smaller, or where the base has no such tensor.
- `INDEX` comes last: every tensor by name, type and shape, in order, and how it was sent. Those without a change, and
  those without elements, are only here.

Header and index are JSON in uint8 tensors, each with its CRC; there is no pickle. Whatever this adds to a stream is a
multiple of `ALIGNMENT` bytes long, since not every engine aligns the tensor after it.

Contract: each side keeps a `Base`, which becomes the new version with the last tensor of the stream. From the first
tensor to the last it is no version at all: after a stream that broke off, only one in full is taken. A stream against
another base, one that is cut off, and one whose sizes contradict each other are refused with `WeightStreamError`. That
the values are right is the checksum's concern (`recipe.async_engine.weights.checksum`). Shown by
tests/integration/test_delta.py; benchmarks/delta_bytes.py measures it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from recipe.async_engine.core.errors import WeightStreamError
from recipe.async_engine.weights.checksum import StreamChecksum

FORMAT = 1
HEADER, INDEX, PACKED = "delta/header", "delta/index", "delta/values/"
FULL, CHANGES, SAME = "full", "changes", "same"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GAP_BYTES = (1, 2)
CRC_BYTES = 4
ALIGNMENT = 16
COUNTS = 3
"""Numbers at the beginning of a packed tensor, int64: of elements, of values sent, of bytes of a gap."""

Entry = tuple[str, str, list[int], str]
"""Of the index: name, type, shape, and `FULL`, `CHANGES` or `SAME`."""

NamedTensor = tuple[str, torch.Tensor]


@dataclass
class Base:
    """The weights of one version in host memory, as they were sent or have arrived."""

    version: int | None = None
    """None where they are not all of one version."""
    checksum: str = ""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Have a copy of a tensor, in place if there is one of its type and shape; returns the copy."""
        mine = self.tensors.get(name)
        if mine is None or not _alike(mine, tensor):
            mine = self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return mine.copy_(tensor)

    def become(self, version: int, checksum: StreamChecksum, names: Iterable[str]) -> None:
        """The tensors of these names are ``version``; others go."""
        kept = set(names)
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in kept}
        self.version, self.checksum = version, checksum.value()


@dataclass
class Sizes:
    """What an encoding came to; bytes without names."""

    values: int = 0
    changed: int = 0
    full_bytes: int = 0
    sent_bytes: int = 0


def encode(
    weights: Iterable[NamedTensor], version: int, base: Base, sizes: Sizes, full: bool = False
) -> Iterator[NamedTensor]:
    """The stream of ``weights``; ``base`` becomes them as it passes.

    Args:
        weights: named tensors of any type, on any device; each name once.
        version: theirs.
        base: what the receivers have, as far as this side knows.
        sizes: filled as the stream passes.
        full: send everything, whatever the base; so it is too if that is no version.
    """
    against = None if full or base.version is None else {"version": base.version, "checksum": base.checksum}
    base.version = None
    checksum = StreamChecksum()
    index: list[Entry] = []
    seen: set[str] = set()

    def sent(name: str, tensor: torch.Tensor) -> NamedTensor:
        sizes.sent_bytes += tensor.nbytes
        return name, tensor

    yield sent(HEADER, _text({"format": FORMAT, "version": version, "base": against}))
    for name, tensor in weights:
        if name in seen or name in (HEADER, INDEX) or name.startswith(PACKED):
            raise WeightStreamError(
                f"tensor {name!r} cannot be sent: its name comes twice, or is one of the stream's own"
            )
        seen.add(name)
        checksum.add(name, tensor)
        sizes.values += tensor.numel()
        sizes.full_bytes += tensor.nbytes
        before = None if against is None else base.tensors.get(name)
        places = None if before is None or not _alike(before, tensor) else _changed(tensor, before)
        sizes.changed += tensor.numel() if places is None else len(places)
        packed = None if places is None or not len(places) else _pack(tensor, places)
        how = FULL
        if not tensor.numel() or (places is not None and not len(places)):
            how = SAME
        elif packed is not None and packed.nbytes < tensor.nbytes:
            how = CHANGES
        index.append((name, _type(tensor), list(tensor.shape), how))
        if how != SAME or not tensor.numel():
            base.keep(name, tensor)
        if how == FULL:
            yield sent(name, tensor)
        elif how == CHANGES:
            assert packed is not None
            yield sent(PACKED + name, packed)
    yield sent(INDEX, _text(index))
    base.become(version, checksum, seen)


class Decoder:
    """The receiving side of one stream; ``base`` becomes what it carries.

    Raises:
        WeightStreamError: from every method; see the module's contract.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self._has = (base.version, base.checksum)
        base.version = None
        self._version: int | None = None
        self._is_against_base = False
        self._came: list[tuple[str, str]] = []
        self._names: set[str] = set()
        self._checksum = StreamChecksum()
        self._is_over = False

    def take(self, name: str, tensor: torch.Tensor) -> Iterator[NamedTensor]:
        """Take what arrived next; yields the tensors that it completes, which are the base's: they are not written to.

        A tensor of the stream is read before this returns.
        """
        if self._is_over:
            raise WeightStreamError(f"{name!r} came after the end of the changes of version {self._version}")
        if self._version is None:
            self._begin(name, tensor)
        elif name == INDEX:
            yield from self._end(_read(tensor))
        elif name.startswith(PACKED):
            yield self._arrived(name.removeprefix(PACKED), CHANGES, tensor)
        else:
            yield self._arrived(name, FULL, tensor)

    def finish(self) -> None:
        """The stream has ended."""
        if not self._is_over:
            raise WeightStreamError(
                f"the stream of version {self._version} was cut off: {len(self._came)} tensors came"
            )

    def _begin(self, name: str, tensor: torch.Tensor) -> None:
        header = _read(tensor) if name == HEADER else None
        if not isinstance(header, dict) or header.get("format") != FORMAT or not isinstance(header.get("version"), int):
            raise WeightStreamError(f"{name!r} is not the beginning of a stream of changes of format {FORMAT}")
        against, version = header.get("base"), header["version"]
        if against is not None:
            wanted = (against.get("version"), against.get("checksum"))
            if wanted != self._has or wanted[0] is None:
                raise WeightStreamError(
                    f"version {version} is sent as changes of version {wanted[0]} ({wanted[1]}), and this receiver has "
                    f"version {self._has[0]} ({self._has[1]}); it has to be sent in full"
                )
        self._version, self._is_against_base = version, against is not None

    def _arrived(self, name: str, how: str, tensor: torch.Tensor) -> NamedTensor:
        if name in self._names:
            raise WeightStreamError(f"tensor {name!r} came twice")
        self._names.add(name)
        if how == FULL:
            whole = self._base.keep(name, tensor)
        else:
            whole = self._of_base(name)
            _apply(name, whole, tensor.cpu())
        self._came.append((name, how))
        self._checksum.add(name, whole)
        return name, whole

    def _of_base(self, name: str) -> torch.Tensor:
        if not self._is_against_base or name not in self._base.tensors:
            raise WeightStreamError(f"changes of tensor {name!r} came, which this receiver does not have")
        return self._base.tensors[name]

    def _end(self, index: Any) -> Iterator[NamedTensor]:
        entries = [_entry(fields) for fields in index] if isinstance(index, list) else []
        sent = [(name, how) for name, _, _, how in entries if how != SAME]
        names = {name for name, _, _, _ in entries}
        if sent != self._came or len(names) != len(entries) or not isinstance(index, list):
            raise WeightStreamError(f"version {self._version} was sent as {len(sent)} tensors, {len(self._came)} came")
        for name, kind, shape, how in entries:
            tensor = torch.empty(shape, dtype=getattr(torch, kind))
            if how == SAME and not tensor.numel():
                self._base.tensors[name] = tensor
            elif how == SAME:
                self._checksum.add(name, self._of_base(name))
            if not _alike(self._base.tensors[name], tensor):
                raise WeightStreamError(f"tensor {name!r} is not the {kind} {shape} that was sent")
            if how == SAME:
                yield name, self._base.tensors[name]
        assert self._version is not None
        self._base.become(self._version, self._checksum, names)
        self._is_over = True


async def decode(stream: Any, base: Base) -> AsyncGenerator[NamedTensor, None]:
    """The weights that ``stream``, a plain or an asynchronous iterator, carries; see `Decoder`."""
    from verl.workers.rollout.utils import ensure_async_iterator

    decoder = Decoder(base)
    async for name, tensor in ensure_async_iterator(stream):
        for named_tensor in decoder.take(name, tensor):
            yield named_tensor
    decoder.finish()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """(elements,), as integers of their size."""
    size = tensor.element_size()
    if size not in INTEGERS:
        raise WeightStreamError(f"values of {size} bytes ({tensor.dtype}) cannot be compared")
    return tensor.detach().reshape(-1).view(INTEGERS[size])


def _changed(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """int64 (changed,), rising: places of values whose bits differ, on the tensor's device."""
    return (_bits(tensor) != _bits(before.to(tensor.device))).nonzero()[:, 0]


def _pack(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """uint8: counts, gaps between places, values there, in the shorter of the two widths of a gap."""
    gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
    sent = {size: len(places) + int((gaps >> 8 * size).sum()) for size in GAP_BYTES}
    size = min(GAP_BYTES, key=lambda size: sent[size] * (size + tensor.element_size()))
    places = _with_stops(places, gaps, 1 << 8 * size)
    gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
    counts = torch.tensor([tensor.numel(), len(places), size], device=tensor.device)
    low_to_high = [(gaps >> 8 * byte).to(torch.uint8) for byte in range(size)]
    values = _bits(tensor)[places].view(torch.uint8)
    padding = values.new_zeros(-(len(places) * size + len(values) + COUNTS * 8) % ALIGNMENT)
    return torch.cat([counts.view(torch.uint8), *low_to_high, values, padding])


def _with_stops(places: torch.Tensor, gaps: torch.Tensor, reach: int) -> torch.Tensor:
    """The places, and as many between them, of values that did not change, that no gap is ``reach`` or more."""
    stops = gaps // reach
    if not bool(stops.any()):
        return places
    ends = (stops + 1).cumsum(0)
    of = torch.arange(len(places), device=places.device).repeat_interleave(stops + 1)
    # How many places before the one that it leads to.
    ahead = ends[of] - 1 - torch.arange(len(of), device=places.device)
    return torch.where(ahead == 0, places[of], (places - gaps)[of] - 1 + (stops[of] - ahead + 1) * reach)


def _apply(name: str, whole: torch.Tensor, packed: torch.Tensor) -> None:
    """Put packed values in their places."""
    begin = COUNTS * 8
    if packed.dtype != torch.uint8 or packed.dim() != 1 or len(packed) < begin:
        raise WeightStreamError(f"the changes of tensor {name!r} are cut off")
    elements, count, size = packed[:begin].clone().view(torch.int64).tolist()
    value_size = whole.element_size()
    if elements != whole.numel() or size not in GAP_BYTES or count < 0:
        raise WeightStreamError(f"the changes of tensor {name!r} are of one of {elements} values, not {whole.numel()}")
    end = begin + count * (size + value_size)
    if len(packed) != end + -end % ALIGNMENT:
        raise WeightStreamError(f"the changes of tensor {name!r} do not have the size of {count} values")
    planes = packed[begin : begin + count * size].view(size, count)
    gaps = sum((plane.to(torch.int64) << 8 * byte for byte, plane in enumerate(planes)), torch.zeros(()).long())
    places = (gaps + 1).cumsum(0) - 1
    if count and int(places[-1]) >= elements:
        raise WeightStreamError(f"the changes of tensor {name!r} go past its end")
    # A copy, since numbers cannot begin at any byte.
    values = packed[begin + count * size : end].clone().view(INTEGERS[value_size])
    _bits(whole)[places] = values


def _text(content: Any) -> torch.Tensor:
    """As uint8: the CRC of a JSON text, and the text."""
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(CRC_BYTES + len(text)) % ALIGNMENT)
    return torch.frombuffer(bytearray(zlib.crc32(text).to_bytes(CRC_BYTES) + text), dtype=torch.uint8)


def _read(tensor: torch.Tensor) -> Any:
    data = bytes(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    crc, text = data[:CRC_BYTES], data[CRC_BYTES:]
    if zlib.crc32(text).to_bytes(CRC_BYTES) != crc:
        raise WeightStreamError("what a stream of changes says of itself did not arrive whole")
    return json.loads(text)


def _entry(fields: Any) -> Entry:
    """An entry of the index, checked."""
    try:
        name, kind, shape, how = fields
        sound = isinstance(getattr(torch, kind), torch.dtype) and isinstance(name, str) and how in (FULL, CHANGES, SAME)
        if sound and all(isinstance(size, int) and size >= 0 for size in shape):
            return name, kind, shape, how
    except (ValueError, TypeError, AttributeError):
        pass
    raise WeightStreamError(f"the index of a stream of changes has the entry {fields!r}")

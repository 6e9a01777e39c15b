# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory: what takes them, and at which moments they are on a device together."""

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes memory.

    If `certain`, its bytes follow from sizes alone, to within a few per cent. Others, such as activations and what
    libraries take, are estimates.
    """

    name: str
    bytes: int
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Moment:
    """What is on a device at the same time; `name` says when."""

    name: str
    items: tuple[Item, ...]

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def certain(self) -> int:
        return sum(item.bytes for item in self.items if item.certain)


@dataclass(frozen=True, slots=True)
class Part:
    """Devices that do the same work.

    Attributes:
        devices: how many there are.
        moments: what each of them has in its memory at different moments.
        settings: what a user would change to need less, most effective first.
        host: what each of them keeps in the memory of its host.
        host_once: what is in the memory of one host only.
        notes: what follows from the amounts, in words.
    """

    name: str
    devices: int
    moments: tuple[Moment, ...]
    settings: tuple[str, ...] = ()
    host: tuple[Item, ...] = ()
    host_once: tuple[Item, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def listed(*items: Item | None) -> tuple[Item, ...]:
    """Return the items that take any memory."""
    return tuple(item for item in items if item is not None and item.bytes > 0)


def gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"

# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory by what takes them, and by the moment at which they are there together."""

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """What takes memory.

    `certain`: it follows from sizes alone, to within a few per cent; of the others (activations, what libraries take)
    the size is an estimate.
    """

    name: str
    bytes: int
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Moment:
    """What is on a device at the same time."""

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
    """The devices that do the same.

    Attributes:
        devices: how many there are.
        settings: what a user would change to need less, most effective first.
        host: what each of them keeps in memory of its host; `host_once` is there once.
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
    """Those that take anything."""
    return tuple(item for item in items if item is not None and item.bytes > 0)


def gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"

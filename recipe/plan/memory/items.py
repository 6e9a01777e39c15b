# SPDX-License-Identifier: Apache-2.0
"""Named amounts of memory, and the phases of a run in which a device holds them at the same time."""

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """A named amount of memory, such as weights or activations.

    A `certain` amount follows from tensor sizes, to within a few per cent; any other amount is a rough estimate.
    """

    name: str
    bytes: int
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Moment:
    """The contents of a device's memory in one phase of the run. `name` is the name of the phase, such as "update"."""

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
    """A part of a run: all devices with the same role, such as trainer ranks.

    Attributes:
        moments: memory of each device in each phase.
        settings: the settings by which the part can be made to need less memory, most effective first.
        host: host memory for each device.
        host_once: host memory that is needed only once for the whole part.
        notes: further remarks for the plan, such as the size of the KV cache.
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
    """Return the items that are not None and have more than 0 bytes."""
    return tuple(item for item in items if item is not None and item.bytes > 0)


def gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"

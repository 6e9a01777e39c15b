# SPDX-License-Identifier: Apache-2.0
"""A trace in Perfetto's own format, written as it is made: groups of tracks, slices, counters and flows.

Contract: memory does not grow with what was written. Slices of one track are apart or inside each other;
:class:`Slots` spreads those that overlap over tracks. Times are seconds of the run's clock, and the trace has its
beginning in the world's time. Slices that have a flow in common are joined by arrows, in the order of their times.

The format: https://perfetto.dev/docs/reference/trace-packet-proto. Shown by tests/integration/test_trace.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackDescriptor, TrackEvent

SEQUENCE = 1
# Packets that are turned into bytes at once.
AT_ONCE = 2_000
BOOTTIME, REALTIME = 6, 1
NANO = 1_000_000_000

Value = int | float | str | None


class TraceFile:
    """Writes to ``file``; see the module's contract.

    Args:
        began: the run's time 0, seconds since 1970.
    """

    def __init__(self, file: IO[bytes], began: float) -> None:
        self._file, self._trace = file, Trace()
        self._tracks = 0
        clocks = self._packet().clock_snapshot.clocks
        clocks.add(clock_id=BOOTTIME, timestamp=0)
        clocks.add(clock_id=REALTIME, timestamp=round(began * NANO))

    def group(self, name: str, parent: int | None = None) -> int:
        """A group of tracks, shown in the order in which they are made; returns what :meth:`track` takes.

        Perfetto's page sorts groups without a parent by name, and processes by how many slices they have.
        """
        self._descriptor(name, parent).child_ordering = TrackDescriptor.EXPLICIT
        return self._tracks

    def track(self, group: int, name: str, unit: str | None = None) -> int:
        """A track of slices, or of a counter if it has a ``unit``."""
        descriptor = self._descriptor(name, group)
        if unit is not None:
            descriptor.counter.unit_name = unit
        return self._tracks

    def begin(
        self,
        track: int,
        name: str,
        at: float,
        category: str,
        values: Mapping[str, Value] | None = None,
        flows: Iterable[int] = (),
    ) -> None:
        """A slice begins; `None` among its values is left out."""
        event = self._event(track, at, TrackEvent.TYPE_SLICE_BEGIN)
        _describe(event, name, category, values or {}, flows)

    def end(self, track: int, at: float) -> None:
        """The slice of the track that began last ends."""
        self._event(track, at, TrackEvent.TYPE_SLICE_END)

    def slice(
        self,
        track: int,
        name: str,
        start: float,
        end: float,
        category: str,
        values: Mapping[str, Value] | None = None,
        flows: Iterable[int] = (),
    ) -> None:
        """One with nothing inside it."""
        self.begin(track, name, start, category, values, flows)
        self.end(track, max(start, end))

    def instant(
        self, track: int, name: str, at: float, category: str, values: Mapping[str, Value] | None = None
    ) -> None:
        event = self._event(track, at, TrackEvent.TYPE_INSTANT)
        _describe(event, name, category, values or {}, ())

    def count(self, track: int, at: float, value: float) -> None:
        """From now on the counter has this value."""
        self._event(track, at, TrackEvent.TYPE_COUNTER).double_counter_value = value

    def flush(self) -> None:
        """Hand everything to the file."""
        self._file.write(self._trace.SerializeToString())
        self._trace = Trace()

    def _packet(self) -> Any:
        if len(self._trace.packet) >= AT_ONCE:
            self.flush()
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def _descriptor(self, name: str, parent: int | None) -> Any:
        descriptor = self._packet().track_descriptor
        self._tracks += 1
        descriptor.uuid = descriptor.sibling_order_rank = self._tracks
        descriptor.name = name
        if parent is not None:
            descriptor.parent_uuid = parent
        return descriptor

    def _event(self, track: int, at: float, kind: int) -> Any:
        packet = self._packet()
        packet.timestamp = max(0, round(at * NANO))
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        return event


def _describe(event: Any, name: str, category: str, values: Mapping[str, Value], flows: Iterable[int]) -> None:
    event.name = name
    event.categories.append(category)
    event.flow_ids.extend(flows)
    for key, value in values.items():
        if value is None:
            continue
        note = event.debug_annotations.add()
        note.name = key
        if isinstance(value, str):
            note.string_value = value
        elif isinstance(value, int):
            note.int_value = value
        else:
            note.double_value = value


@dataclass
class Slots:
    """Tracks for slices that overlap: each one goes to the first track that is free when it begins.

    They are asked for in the order of their beginnings.
    """

    file: TraceFile
    group: int
    name: str
    _busy: list[tuple[float, int]] = field(default_factory=list)
    _free: list[tuple[int, int]] = field(default_factory=list)
    _made: int = 0

    def take(self, start: float, end: float) -> int:
        """The track for a slice from then to then."""
        while self._busy and self._busy[0][0] <= start:
            track = heapq.heappop(self._busy)[1]
            heapq.heappush(self._free, (track, track))
        if self._free:
            track = heapq.heappop(self._free)[0]
        else:
            self._made += 1
            track = self.file.track(self.group, f"{self.name} {self._made}")
        heapq.heappush(self._busy, (max(start, end), track))
        return track

# SPDX-License-Identifier: Apache-2.0
"""Writes a trace in Perfetto's format incrementally: groups of tracks, slices, counters and flows.

Contract: memory use does not grow with the trace. Slices on one track must be disjoint or nested; :class:`Slots`
distributes overlapping slices over several tracks. Times are seconds of the run's clock; the trace contains the UTC
time of this clock's zero. Perfetto connects slices with the same flow id by arrows, in order of time. Format:
https://perfetto.dev/docs/reference/trace-packet-proto. Shown by tests/integration/test_trace.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

SEQUENCE = 1
BOOTTIME, REALTIME = 6, 1
NANO = 1_000_000_000

Value = int | float | str | None


class TraceFile:
    """Writes one trace to ``file``. ``began`` is the time 0 of the run's clock, in seconds since 1970."""

    def __init__(self, file: IO[bytes], began: float) -> None:
        self._builder = StreamingTraceProtoBuilder(file)
        self._tracks = 0
        packet = self._packet()
        for clock, at in ((BOOTTIME, 0), (REALTIME, round(began * NANO))):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=at)
        self._builder.write_packet(packet)

    def group(self, name: str, parent: int | None = None) -> int:
        """Create a group of tracks, and return its number for :meth:`track`.

        The tracks of a group are shown in the order of their creation. Perfetto's page sorts groups that have no
        ``parent`` by name.
        """
        return self._described(name, parent, child_ordering=TrackDescriptor.EXPLICIT)

    def track(self, group: int, name: str, unit: str | None = None) -> int:
        """Create a track of slices, or a counter track if ``unit`` is given; return its number."""
        return self._described(name, group, **({} if unit is None else {"counter": {"unit_name": unit}}))

    def begin(
        self,
        track: int,
        name: str,
        at: float,
        category: str,
        values: Mapping[str, Value] | None = None,
        flows: Iterable[int] = (),
        kind: int = TrackEvent.TYPE_SLICE_BEGIN,
    ) -> None:
        """Begin a slice at the time ``at``, or write an event of another ``kind``, such as an instant.

        ``values`` are shown with the event, except those that are None. ``flows`` are ids of the flows (arrows) that
        pass through the event.
        """
        packet, event = self._event(track, at, kind)
        event.name = name
        event.categories.append(category)
        event.flow_ids.extend(flows)
        for key, value in (values or {}).items():
            if value is not None:
                type_of = "string" if isinstance(value, str) else "int" if isinstance(value, int) else "double"
                event.debug_annotations.add(name=key, **{f"{type_of}_value": value})
        self._builder.write_packet(packet)

    def end(self, track: int, at: float) -> None:
        """End the track's innermost open slice."""
        self._builder.write_packet(self._event(track, at, TrackEvent.TYPE_SLICE_END)[0])

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
        """Write a slice that contains no other slice."""
        self.begin(track, name, start, category, values, flows)
        self.end(track, max(start, end))

    def instant(self, track: int, name: str, at: float, category: str) -> None:
        self.begin(track, name, at, category, kind=TrackEvent.TYPE_INSTANT)

    def count(self, track: int, at: float, value: float) -> None:
        """Set the value of a counter track from the time ``at`` on."""
        packet, event = self._event(track, at, TrackEvent.TYPE_COUNTER)
        event.double_counter_value = value
        self._builder.write_packet(packet)

    def _packet(self) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def _described(self, name: str, parent: int | None, **more: Any) -> int:
        number = self._tracks = self._tracks + 1
        packet = self._packet()
        packet.track_descriptor.MergeFrom(
            TrackDescriptor(uuid=number, sibling_order_rank=number, name=name, parent_uuid=parent, **more)
        )
        self._builder.write_packet(packet)
        return number

    def _event(self, track: int, at: float, kind: int) -> tuple[Any, Any]:
        """Return a new packet, which is not yet written, and the event inside it."""
        packet = self._packet()
        packet.timestamp = max(0, round(at * NANO))
        packet.track_event.type, packet.track_event.track_uuid = kind, track
        return packet, packet.track_event


@dataclass
class Slots:
    """Provides tracks for slices that may overlap: each slice, in order of start, gets the first track that is free."""

    file: TraceFile
    group: int
    name: str
    _busy: list[tuple[float, int]] = field(default_factory=list)
    _free: list[int] = field(default_factory=list)
    _made: int = 0

    def take(self, start: float, end: float) -> int:
        """Reserve the first track that is free from ``start`` to ``end``, and return its number."""
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            track = heapq.heappop(self._free)
        else:
            self._made += 1
            track = self.file.track(self.group, f"{self.name} {self._made}")
        heapq.heappush(self._busy, (max(start, end), track))
        return track

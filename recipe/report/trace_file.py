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

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

SEQUENCE = 1
BOOTTIME, REALTIME = 6, 1
NANO = 1_000_000_000

Value = int | float | str | None


class TraceFile:
    """Writes to ``file``; see the module's contract.

    Args:
        began: the run's time 0, seconds since 1970.
    """

    def __init__(self, file: IO[bytes], began: float) -> None:
        self._builder = StreamingTraceProtoBuilder(file)
        self._tracks = 0
        packet = self._packet()
        for clock, at in ((BOOTTIME, 0), (REALTIME, round(began * NANO))):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=at)
        self._builder.write_packet(packet)

    def group(self, name: str, parent: int | None = None) -> int:
        """A group of tracks, shown in the order in which they are made; returns what :meth:`track` takes.

        Perfetto's page sorts groups without a parent by name, and processes by how many slices they have.
        """
        return self._described(name, parent, child_ordering=TrackDescriptor.EXPLICIT)

    def track(self, group: int, name: str, unit: str | None = None) -> int:
        """A track of slices, or of a counter if it has a ``unit``."""
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
        """A slice begins, or something else of that ``kind``; `None` among its values is left out."""
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
        """The slice of the track that began last ends."""
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
        """One with nothing inside it."""
        self.begin(track, name, start, category, values, flows)
        self.end(track, max(start, end))

    def instant(self, track: int, name: str, at: float, category: str) -> None:
        """Something without a length."""
        self.begin(track, name, at, category, kind=TrackEvent.TYPE_INSTANT)

    def count(self, track: int, at: float, value: float) -> None:
        """From now on the counter has this value."""
        packet, event = self._event(track, at, TrackEvent.TYPE_COUNTER)
        event.double_counter_value = value
        self._builder.write_packet(packet)

    def _packet(self) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def _described(self, name: str, parent: int | None, **more: Any) -> int:
        """A new group or track; returns its number."""
        number = self._tracks = self._tracks + 1
        packet = self._packet()
        packet.track_descriptor.MergeFrom(
            TrackDescriptor(uuid=number, sibling_order_rank=number, name=name, parent_uuid=parent, **more)
        )
        self._builder.write_packet(packet)
        return number

    def _event(self, track: int, at: float, kind: int) -> tuple[Any, Any]:
        """A packet that is still to be written, and the event in it."""
        packet = self._packet()
        packet.timestamp = max(0, round(at * NANO))
        packet.track_event.type, packet.track_event.track_uuid = kind, track
        return packet, packet.track_event


@dataclass
class Slots:
    """Tracks for slices that overlap: each one goes to the first track that is free when it begins.

    They are asked for in the order of their beginnings.
    """

    file: TraceFile
    group: int
    name: str
    _busy: list[tuple[float, int]] = field(default_factory=list)
    _free: list[int] = field(default_factory=list)
    _made: int = 0

    def take(self, start: float, end: float) -> int:
        """The track for a slice from then to then."""
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            track = heapq.heappop(self._free)
        else:
            self._made += 1
            track = self.file.track(self.group, f"{self.name} {self._made}")
        heapq.heappush(self._busy, (max(start, end), track))
        return track

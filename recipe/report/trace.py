# SPDX-License-Identifier: Apache-2.0
"""Writes the events of a run as a trace for Perfetto; docs/report.md describes the tracks and gives example queries.

Contract: the trace contains the whole time account (device seconds by class) as slices of the category `account`. Each
slice has the share of the device's sequence slots that the class used; the sum of length times share over slices gives
the seconds in the time account. Flows (Perfetto's arrows) lead from a prompt group to its answers, from an answer to
the batch with which it was trained, and from a batch to the version that it produced. Runs that have not ended, or were
killed, can be traced too. Shown by tests/integration/test_trace.py.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from recipe.async_engine.record.event_file import events_of
from recipe.async_engine.record.events import ENDS, RUN, SAMPLED, SCHEDULER, TRAINER, WEIGHTS, Class, Event
from recipe.report.account import KINDS, Kind, Piece
from recipe.report.run import Run, about, answer_counts
from recipe.report.trace_file import Slots, TraceFile, Value

ACCOUNT, PHASE, BATCH, TRAJECTORY = "account", "phase", "batch", "trajectory"
GROUP, VERSION, DEVICE = "group", "version", "device"
"""Categories of slices in the trace."""
WORK = (Kind.USEFUL, Kind.REPEATED)
ROWS_AT_ONCE = 20_000
BATCHES = 1 << 62
"""Ids of trace flows from here on belong to batches. The flows of answers have smaller ids."""
ANSWERS_AT_MOST = 1 << 24
SAME_MOMENT_S = 1e-5


class Batch(NamedTuple):
    """A batch of the trainer, and the flows (arrows in Perfetto) that begin or end at it.

    Attributes:
        flow: id of the flow to the version that the batch produced.
        answers: ids of the flows from the batch's answers.
    """

    version: int
    start: float
    end: float
    tokens: int
    mean_age: float
    flow: int
    answers: list[int]


def write_trace(run: Run, path: Path) -> None:
    with open(path, "wb") as stream:
        file = TraceFile(stream, run.header.began)
        batches = _batches(run)
        _devices(file, file.group("accelerators"), run, batches)
        parts = file.group("run")
        _versions(file, parts, run, batches)
        _lane(file, parts, "why nothing begins", (event for event in run.events if event.lane == SCHEDULER), SCHEDULER)
        _groups(file, parts, run)
        _trajectories(file, parts, run)


def answer_flow(group: int, trajectory: int) -> int:
    return group * ANSWERS_AT_MOST + trajectory + 1


def _versions(file: TraceFile, parent: int, run: Run, batches: list[Batch]) -> None:
    """Write the phases of each weight sync, and the times at which devices were lost or replaced."""
    became: defaultdict[int, list[int]] = defaultdict(list)
    for batch in batches:
        became[batch.version + 1].append(batch.flow)
    events = sorted((event for event in run.events if event.lane == WEIGHTS), key=lambda event: event.start)
    slots = Slots(file, file.group("weight syncs", parent), "versions")
    for event in events:
        flows = became.pop(event.version or 0, ())
        name = f"{event.what} version {event.version}"
        track = slots.take(event.start, event.end)
        file.slice(track, name, event.start, event.end, VERSION, {"version": event.version}, flows)
    devices = file.track(parent, "devices")
    changes = (event for event in run.events if event.lane == RUN and event.what != SAMPLED)
    for event in sorted(changes, key=lambda event: event.start):
        file.instant(devices, f"{event.what} {event.text}", event.start, DEVICE)


def _devices(file: TraceFile, parent: int, run: Run, batches: list[Batch]) -> None:
    """Write the phases and batches of the trainer, and the time account of each device."""
    by_device: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in run.pieces:
        by_device[piece.device].append(piece)
    ends = {event.text: event.start for event in run.events if event.lane == RUN and event.what == ENDS}
    for device in run.account.devices:
        by_device[device] = list(_without_gaps(by_device[device], min(run.until, ends.get(device, run.until))))
    trainer = _named(file, parent, run, TRAINER)
    _lane(file, trainer, "phases", (event for event in run.events if event.lane == TRAINER), PHASE)
    _account(file, trainer, TRAINER, by_device.pop(TRAINER, []))
    slots, age = Slots(file, trainer, "batches"), file.track(trainer, "age of tokens, mean of a batch", "versions")
    for batch in batches:
        values = {"version": batch.version, "tokens": batch.tokens, "mean_age": batch.mean_age}
        track = slots.take(batch.start, batch.end)
        flows = [batch.flow, *batch.answers]
        file.slice(track, f"batch of version {batch.version}", batch.start, batch.end, BATCH, values, flows)
        file.count(age, batch.start, batch.mean_age)
    for device in run.account.devices:
        if device != TRAINER:
            _account(file, _named(file, parent, run, device), device, by_device[device])


def _named(file: TraceFile, parent: int, run: Run, device: str) -> int:
    accelerators = run.devices.size(device)
    return file.group(device if accelerators == 1 else f"{device} ({accelerators} accelerators)", parent)


def _lane(file: TraceFile, parent: int, name: str, events: Iterable[Event], category: str) -> None:
    """Write a track of events, which must not overlap. Consecutive events with the same activity become one slice."""
    track = file.track(parent, name)
    for what, found in groupby(sorted(events, key=lambda event: event.start), key=lambda event: event.what):
        spans = list(found)
        file.slice(track, what, spans[0].start, spans[-1].end, category)


def _account(file: TraceFile, parent: int, device: str, pieces: list[Piece]) -> None:
    """Write how a device spent its time: on one track for the trainer, on one per `Class` for any other device."""
    tracks: dict[str, int] = {}
    for piece in sorted(_joined(pieces), key=lambda piece: piece.start):
        name = ACCOUNT if device == TRAINER else str(piece.what)
        if name not in tracks:
            tracks[name] = file.track(parent, name)
        values: dict[str, Value] = {"share": piece.share, "kind": str(KINDS[piece.what]), "device": device}
        file.slice(tracks[name], str(piece.what), piece.start, piece.end, ACCOUNT, values)
    if device != TRAINER and pieces:
        busy = file.track(parent, "places in use", "share")
        for start, found in groupby(pieces, key=lambda piece: piece.start):
            file.count(busy, start, sum(piece.share for piece in found if KINDS[piece.what] in WORK))


def _without_gaps(pieces: list[Piece], end: float) -> Iterator[Piece]:
    """Yield the pieces of a device in order of start, and fill gaps up to ``end`` with pieces of `Class.NOT_KNOWN`."""
    until = 0.0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if until and piece.start - until > SAME_MOMENT_S:
            yield Piece(piece.device, until, piece.start, Class.NOT_KNOWN, 1.0)
        until = max(until, piece.end)
        if piece.end > piece.start:
            yield piece
    if pieces and end - until > SAME_MOMENT_S:
        yield Piece(pieces[0].device, until, end, Class.NOT_KNOWN, 1.0)


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces, merging consecutive ones that have the same class and the same share of the sequence slots."""
    open_ones: dict[Class, Piece] = {}
    for piece in pieces:
        before = open_ones.get(piece.what)
        if before is not None and before.share == piece.share and piece.start - before.end < SAME_MOMENT_S:
            open_ones[piece.what] = before._replace(end=piece.end)
        else:
            if before is not None:
                yield before
            open_ones[piece.what] = piece
    yield from open_ones.values()


def _groups(file: TraceFile, parent: int, run: Run) -> None:
    """Write a slice for each prompt group, from its beginning to its end.

    A second slice shows the time in which the group was ready to be trained.
    """
    slots = Slots(file, file.group("prompt groups", parent), "groups")
    ready: dict[int, float] = {}
    rows = []
    for event in _rows(run.groups):
        assert event.group is not None
        if event.what == "ready":
            ready[event.group] = event.start
        else:
            rows.append(event)
    answers = answer_counts(run)
    for event in sorted(rows, key=lambda event: event.start):
        track, group = slots.take(event.start, event.end), event.group or 0
        values = {"group": group, "version": event.version, "tokens": event.tokens, "reason": event.text}
        flows = [answer_flow(group, n) for n in range(answers[group])]
        file.begin(track, f"{event.what} {group}", event.start, GROUP, values, flows)
        if group in ready:
            file.slice(track, "ready", ready[group], event.end, GROUP, {"group": group})
        file.end(track, event.end)


def _trajectories(file: TraceFile, parent: int, run: Run) -> None:
    """Write two slices for each attempt to generate an answer: until its last token, and from then to its reward."""
    slots = Slots(file, file.group("trajectories", parent), "trajectory")
    rewarded = {_key(event, event.start): event.end for event in _rows(about(run.trajectories, "reward"))}
    recomputed = {_key(event, event.start): event.tokens for event in _rows(about(run.trajectories, "interrupted"))}
    for event in _rows(about(run.trajectories, "generating")):
        reward_end = rewarded.get(_key(event, event.end))
        track = slots.take(event.start, reward_end or event.end)
        named = {"group": event.group, "trajectory": event.trajectory}
        values: dict[str, Value] = {
            **named,
            "version": event.version,
            "tokens": event.tokens,
            "attempt": event.text,
            "recomputed_tokens": recomputed.get(_key(event, event.start)),
        }
        flows = [answer_flow(event.group or 0, event.trajectory or 0)]
        file.slice(track, event.what, event.start, event.end, TRAJECTORY, values, flows)
        if reward_end is not None:
            file.slice(track, "reward", event.end, reward_end, TRAJECTORY, named)


def _key(event: Event, at: float) -> tuple[int | None, int | None, float]:
    return event.group, event.trajectory, at


def _rows(table: pa.Table) -> Iterator[Event]:
    """Yield the events of a table in order of start. At most `ROWS_AT_ONCE` rows are converted at a time."""
    for part in table.sort_by("start").to_batches(ROWS_AT_ONCE):
        yield from events_of(pa.Table.from_batches([part]))


def _batches(run: Run) -> list[Batch]:
    """Return the trainer's batches.

    A batch has several events in the run's `tokens`, one for each age of tokens, all with the same time. The batch's
    groups are the ones that were trained after this time, and not after the time of the next batch.
    """
    counts = sorted(events_of(run.tokens), key=lambda event: event.start)
    moments = [list(rows) for _, rows in groupby(counts, key=lambda event: event.start)]
    trained = sorted(_rows(about(run.groups, "trained")), key=lambda event: event.end)
    ends, answers = [event.end for event in trained], answer_counts(run)
    batches = []
    for number, rows in enumerate(moments):
        start, following = rows[0].start, moments[number + 1 : number + 2]
        groups = trained[bisect(ends, start) : bisect(ends, following[0][0].start) if following else None]
        of_groups = [answer_flow(event.group or 0, n) for event in groups for n in range(answers[event.group or 0])]
        tokens = sum(row.tokens or 0 for row in rows)
        mean_age = sum(int(row.what) * (row.tokens or 0) for row in rows) / max(1, tokens)
        end = groups[-1].end if groups else start
        batches.append(Batch(rows[0].version or 0, start, end, tokens, mean_age, BATCHES + number, of_groups))
    return batches

# SPDX-License-Identifier: Apache-2.0
"""The event record on disk: one Arrow IPC stream for each launch of a run, in ``events/`` of the run's folder.

Contract: written events are readable at any time, also after ``kill -9`` and while the run continues. A reader stops
at an incomplete batch and ignores everything after it. If a batch cannot be written, for example on a full disk, the
file stays as it was, and the batch is written together with the next one. At most `WAITING` events wait to be written;
further events are dropped and counted. The schema's metadata holds the format version and the run's header
(docs/run-record.md). Shown by tests/core/test_event_file.py.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json

from recipe.async_engine.record.events import (
    BEGINS,
    ENDS,
    GROUPS,
    JOINED,
    LOST,
    RUN,
    SAMPLED,
    TOKENS,
    TRAJECTORIES,
    WEIGHTS,
    Event,
)
from recipe.async_engine.record.schema import LIMIT, BadFile, OtherFormat

logger = logging.getLogger(__name__)

FOLDER = "events"
VERSION = 1
WAITING = 200_000
HEADER, FORMAT = b"recipe.run", b"recipe.events"

COLUMNS = pa.schema(
    [
        ("lane", pa.string()),
        ("what", pa.string()),
        ("start", pa.float64()),
        ("end", pa.float64()),
        ("share", pa.float64()),
        ("version", pa.int32()),
        ("group", pa.int64()),
        ("trajectory", pa.int32()),
        ("tokens", pa.int64()),
        ("text", pa.string()),
    ]
)
COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


def files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the event files in a run's folder, one for each launch, the newest last."""
    found = (path for path in Path(folder, FOLDER).glob("*.arrow") if path.stem.isdecimal())
    return sorted(found, key=lambda path: int(path.stem))


class EventFile:
    """Writes the events of this launch to a new file. `lost` is the number of events that could not be written.

    The constructor raises OSError if the file cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        Path(folder, FOLDER).mkdir(parents=True, exist_ok=True)
        before = files(folder)
        number = int(before[-1].stem) + 1 if before else 0
        self.path = Path(folder, FOLDER, f"{number:04d}.arrow")
        self.lost = 0
        self._failed = False
        self._waiting: list[Event] = []
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 - it stays open as long as the run
        # The stream's output that is not in the file yet, and the number of events in this output.
        self._bytes, self._in_bytes = io.BytesIO(), 0
        metadata = {FORMAT: str(VERSION).encode(), HEADER: json.dumps(header).encode()}
        self._schema = COLUMNS.with_metadata(metadata)
        self._stream = pa.ipc.new_stream(self._bytes, self._schema, options=COMPRESSED)

    def write(self, events: Sequence[Event]) -> None:
        """Write ``events``, after those that earlier calls could not write."""
        room = WAITING - len(self._waiting)
        self.lost += max(0, len(events) - room)
        self._waiting += events[:room]
        if self._waiting and self._flushed():
            columns = zip(*self._waiting, strict=True)
            arrays = [pa.array(column, type=field.type) for column, field in zip(columns, COLUMNS, strict=True)]
            self._stream.write_batch(pa.record_batch(arrays, schema=self._schema))
            self._waiting, self._in_bytes = [], len(self._waiting)
            self._flushed()

    def close(self) -> None:
        """Write the waiting events and the end of the stream. Events that still cannot be written are lost."""
        self.write([])
        if self._flushed():
            self._stream.close()
            self._flushed()
        self.lost += len(self._waiting) + self._in_bytes
        self._file.close()

    def _flushed(self) -> bool:
        """Copy the stream's output to the file, and return whether all of it was written."""
        content = self._bytes.getvalue()
        before = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(before)
            self._file.seek(before)
            if not self._failed:
                logger.error("%s cannot be written, the run goes on: %s", self.path, error)
            self._failed = True
            return False
        self._bytes.seek(0)
        self._bytes.truncate()
        self._in_bytes = 0
        return True


NEEDS = {
    TRAJECTORIES: ("group", "trajectory", "version"),
    GROUPS: ("group",),
    TOKENS: ("version", "tokens"),
    WEIGHTS: ("version",),
}
"""For some values of the column ``lane``, the columns that must not be null in an event with this value."""
MOST_OF = {"version": 1 << 30, "group": 1 << 37, "trajectory": 1 << 20, "tokens": 1 << 40}
OFF_BY_S = 1.0
"""Largest assumed difference in seconds between hosts' clocks. An event may start this long before the run does, or end
this long before its own start."""
NAMES_DEVICE = (BEGINS, ENDS, LOST, JOINED, SAMPLED)


BROKEN = (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, MemoryError, OverflowError)
"""Errors that Arrow raises for an invalid stream."""
CUT = re.compile(r"only (read )?\d+|be able to read")
"""Matches the text of Arrow's errors for an incomplete message."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class Recorded(NamedTuple):
    """The event record of one launch, as far as it could be read.

    Attributes:
        header: the unchecked header (of the type `record.schema.Header`), or {} if the run ended before writing it.
        notes: texts about damaged or invalid content that was left out.
    """

    header: dict[str, Any]
    events: pa.Table
    notes: list[str]


def read(path: str | os.PathLike[str]) -> Recorded:
    """Return the header and the events of one event file.

    Raises:
        OtherFormat: the file has another format version.
        BadFile: the file cannot be read.
    """
    tail, notes = Tail(path), []
    try:
        events = tail.table()
        with open(path, "rb") as file:
            file.seek(tail.at)
            rest = file.read(len(END_OF_STREAM))
    except OSError as error:
        raise BadFile(f"{os.fspath(path)} cannot be read: {error}") from None
    if tail.header is None:
        if tail.damage is not None:
            raise BadFile(tail.damage)
        return Recorded({}, events, [])
    if rest not in (b"", END_OF_STREAM):
        whole = events.num_rows + tail.left_out
        why = tail.damage or "its end is missing"
        notes.append(f"{path}: the content after {whole} events is cut off or damaged, and left out ({why})")
    if tail.left_out:
        notes.append(f"{path}: {tail.left_out} rows are not valid events, and are left out")
    return Recorded(tail.header, events, notes)


class Tail:
    """Reads the events that are added to a file, even while a run writes to it, and stops at damaged content.

    Attributes:
        at: number of bytes read so far.
        header: the unchecked header, or None until it can be read.
        damage: description of the damage at which reading stopped, or None.
        left_out: number of rows so far that are not valid events.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self.at = os.fspath(path), 0
        self._schema: pa.Schema | None = None
        self.header: dict[str, Any] | None = None
        self.damage: str | None = None
        self.left_out = 0

    def new(self) -> list[Event]:
        """Return the valid events that were added since the last call, as a list."""
        return events_of(self.table())

    def table(self) -> pa.Table:
        """Return the valid events that were added since the last call, as a table.

        Raises:
            OtherFormat: the file has another format version.
            OSError: the file does not exist or cannot be opened.
        """
        batches: list[pa.RecordBatch] = []
        with pa.OSFile(self._path) as file:
            file.seek(self.at)
            while self.damage is None:
                try:
                    if (message := _message(file)) is None:
                        break
                    # Check the type here, because Arrow does not: it would decode any message as a schema or a batch.
                    if message.type != ("schema" if self._schema is None else "record batch"):
                        raise BadFile(f"the file has an unexpected Arrow message of type {message.type}")
                    if self._schema is None:
                        schema = pa.ipc.read_schema(message)
                        self.header, self._schema = _header(self._path, schema), schema
                    else:
                        batch, none = _sound(pa.ipc.read_record_batch(message, self._schema))
                        batches.append(batch)
                        self.left_out += none
                    self.at = file.tell()
                except OtherFormat:
                    raise
                except (*BROKEN, BadFile) as error:
                    self.damage = f"{self._path} cannot be read from here on: {error}"
        return pa.Table.from_batches(batches, schema=COLUMNS)


def _message(file: pa.NativeFile) -> pa.Message | None:
    """Return the next message of a stream, or None if the stream ends here or the message is incomplete."""
    try:
        return pa.ipc.read_message(file)
    except EOFError:
        return None
    except BROKEN as error:
        if CUT.search(str(error)):
            return None
        raise


def _header(path: str, schema: pa.Schema) -> dict[str, Any]:
    metadata = schema.metadata or {}
    if (found := metadata.get(FORMAT, b"none").decode(errors="replace")) != str(VERSION):
        raise OtherFormat(f"{path} has events of version {found}; this package reads version {VERSION}")
    if not schema.equals(COLUMNS):
        raise BadFile(f"the columns of the file are not those of format version {VERSION}")
    try:
        header = from_json(metadata.get(HEADER, b""))
    except ValueError as error:
        raise BadFile(f"the header of the file is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise BadFile("the header of the file is not a JSON object")
    return header


def _sound(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """Return the valid events of ``batch``, and the number of invalid ones.

    If the batch is damaged, raise one of the errors in `BROKEN`.
    """
    batch.validate(full=True)
    of = {name: batch.column(name) for name in COLUMNS.names}
    lane, what = of["lane"], of["what"]
    names_device = pc.and_(pc.equal(lane, RUN), pc.is_in(what, pa.array(NAMES_DEVICE)))
    # A comparison with NaN is false, and one with null is null, which `fill_null` replaces below.
    conditions = [
        pc.and_(pc.greater(of["start"], -OFF_BY_S), pc.less(of["end"], LIMIT)),
        pc.less_equal(of["start"], pc.add(of["end"], OFF_BY_S)),
        pc.and_(pc.greater_equal(of["share"], 0.0), pc.less_equal(of["share"], 1.01)),
        pc.and_(pc.is_valid(lane), pc.is_valid(what)),
        pc.or_(pc.invert(names_device), pc.is_valid(of["text"])),
        pc.or_(pc.not_equal(lane, TOKENS), pc.match_substring_regex(what, r"^-?[0-9]{1,9}$")),
    ]
    for name, most in MOST_OF.items():
        fits = pc.and_(pc.greater_equal(of[name], 0), pc.less(of[name], most))
        conditions.append(pc.fill_null(fits, True))
    for of_lane, names in NEEDS.items():
        conditions += [pc.or_(pc.not_equal(lane, of_lane), pc.is_valid(of[name])) for name in names]
    holds = pc.fill_null(reduce(pc.and_, conditions), False)
    found = pa.RecordBatch.from_arrays([*of.values()], schema=COLUMNS).filter(holds)
    return found, batch.num_rows - found.num_rows


def events_of(table: pa.Table) -> list[Event]:
    """Convert the rows of a table of events, such as `read` returns, to `Event` objects."""
    return [Event(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)]

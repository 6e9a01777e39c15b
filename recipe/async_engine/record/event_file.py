# SPDX-License-Identifier: Apache-2.0
"""The record of events on disk: one Arrow IPC stream for each start of a run, in ``events/`` of its folder.

Contract: what was written is readable at any moment, also after ``kill -9`` and of a run that goes on; of a batch that
was cut off, and of what would come after it, nothing is read. A batch that cannot be written, on a full disk for
example, leaves the file as it was and is tried again with the next one; beyond `WAITING` events, those that come are
dropped and counted. The schema's metadata has the format's version and the run's header: docs/run-record.md.

Shown by tests/core/test_event_file.py.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json

from recipe.async_engine.record.events import GROUPS, RUN, TOKENS, TRAJECTORIES, WEIGHTS, Event
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
    """The record's files of a run's folder, one for each start, the newest last; others' files are left out."""
    found = (path for path in Path(folder, FOLDER).glob("*.arrow") if path.stem.isdecimal())
    return sorted(found, key=lambda path: int(path.stem))


class EventFile:
    """A new file for this start of the run in ``folder``; raises OSError if there can be none.

    Attributes:
        lost: events that were dropped.
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
        # Holds what the stream's writer has written and the file does not have yet.
        self._bytes, self._in_bytes = io.BytesIO(), 0
        metadata = {FORMAT: str(VERSION).encode(), HEADER: json.dumps(header).encode()}
        self._schema = COLUMNS.with_metadata(metadata)
        self._stream = pa.ipc.new_stream(self._bytes, self._schema, options=COMPRESSED)

    def write(self, events: Sequence[Event]) -> None:
        """Have these in the file, with what could not be written before."""
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
        """Write what waits, and the stream's end; what still cannot be written is lost."""
        self.write([])
        if self._flushed():
            self._stream.close()
            self._flushed()
        self.lost += len(self._waiting) + self._in_bytes
        self._file.close()

    def _flushed(self) -> bool:
        """Whether the file has all that the stream's writer has written."""
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
"""What an event of these lanes is nothing without."""
MOST_OF = {"version": 1 << 30, "group": 1 << 37, "trajectory": 1 << 20, "tokens": 1 << 40}
OFF_BY_S = 1.0
"""An event may begin before the run, or end before it begins, by this much: clocks of several hosts are compared."""
NAMES_DEVICE = ("lost", "joined", "begins", "ends", "sampled")


class Recorded(NamedTuple):
    """One start's record, as far as it is whole. notes: what is wrong with it, and was left out.

    header: as it was written (`record.schema.Header`); empty where the run ended before anything was.
    """

    header: dict[str, Any]
    events: pa.Table
    notes: list[str]


def read(path: str | os.PathLike[str]) -> Recorded:
    """The header and the events of one file.

    Raises:
        OtherFormat: it is of another version.
        BadFile: it cannot be read.
    """
    name = os.fspath(path)
    notes = []
    try:
        with pa.OSFile(name) as file:
            if not _has_begun(file):
                return Recorded({}, COLUMNS.empty_table(), [])
            stream = pa.ipc.open_stream(file)
            header = _header(name, stream.schema)
            batches, left_out, damage = _whole(stream)
    except BROKEN as error:
        raise BadFile(f"{name} cannot be read: {error}") from None
    if damage is not None:
        whole = sum(map(len, batches)) + left_out
        notes.append(f"{name}: what comes after {whole} events is cut off or damaged, and left out ({damage})")
    if left_out:
        notes.append(f"{name}: {left_out} events are none, and are left out")
    return Recorded(header, pa.Table.from_batches(batches, schema=COLUMNS), notes)


def _has_begun(file: pa.NativeFile) -> bool:
    """Whether the stream's schema is there as a whole; a run may have ended before."""
    try:
        return pa.ipc.read_message(file) is not None
    except EOFError:
        return False
    except pa.ArrowInvalid as error:
        if CUT.search(str(error)):
            return False
        raise
    finally:
        file.seek(0)


BROKEN = (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, MemoryError, OverflowError)
"""What Arrow raises of a stream that is none."""
Whole = tuple[list[pa.RecordBatch], int, Exception | None]


def _whole(stream: Any) -> Whole:
    """The batches up to the first that is not whole, how many of their events are none, and what ended it."""
    batches: list[pa.RecordBatch] = []
    left_out = 0
    while True:
        try:
            batch, none = _sound(stream.read_next_batch())
        except StopIteration:
            return batches, left_out, None
        except BROKEN as error:
            return batches, left_out, error
        batches.append(batch)
        left_out += none


CUT = re.compile(r"only (read )?\d+|be able to read")
"""What Arrow says of a message whose end is not there."""


def _sound(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """The events of a batch without those that are none, and their number; raises what `BROKEN` has."""
    batch.validate(full=True)
    columns = {name: batch.column(name) for name in COLUMNS.names}
    start, end, share = columns["start"], columns["end"], columns["share"]
    # Comparisons with NaN are false, and those with null are null.
    holds = pc.and_(pc.greater(start, -OFF_BY_S), pc.less(end, LIMIT))
    holds = pc.and_(holds, pc.less_equal(start, pc.add(end, OFF_BY_S)))
    holds = pc.and_(holds, pc.and_(pc.greater_equal(share, 0.0), pc.less_equal(share, 1.01)))
    holds = pc.and_(holds, pc.and_(pc.is_valid(columns["lane"]), pc.is_valid(columns["what"])))
    for name, most in MOST_OF.items():
        fits = pc.and_(pc.greater_equal(columns[name], 0), pc.less(columns[name], most))
        holds = pc.and_(holds, pc.fill_null(fits, True))
    for lane, names in NEEDS.items():
        for name in names:
            holds = pc.and_(holds, pc.or_(pc.not_equal(columns["lane"], lane), pc.is_valid(columns[name])))
    of_device = pc.and_(pc.equal(columns["lane"], RUN), pc.is_in(columns["what"], pa.array(NAMES_DEVICE)))
    holds = pc.and_(holds, pc.or_(pc.invert(of_device), pc.is_valid(columns["text"])))
    is_age = pc.match_substring_regex(columns["what"], r"^-?[0-9]{1,9}$")
    holds = pc.fill_null(pc.and_(holds, pc.or_(pc.not_equal(columns["lane"], TOKENS), is_age)), False)
    found = pa.RecordBatch.from_arrays([columns[name] for name in COLUMNS.names], schema=COLUMNS).filter(holds)
    return found, batch.num_rows - found.num_rows


class Tail:
    """The events of a file that is being written, as they come; nothing is read past what is damaged.

    Attributes:
        damage: what is wrong with the file, if anything.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._at = os.fspath(path), 0
        self._schema: pa.Schema | None = None
        self.damage: str | None = None

    def new(self) -> list[Event]:
        """Those that have come since it was asked last, as far as they are whole.

        Raises:
            OtherFormat: the file is of another version.
        """
        events: list[Event] = []
        if self.damage is not None:
            return events
        with pa.OSFile(self._path) as file:
            file.seek(self._at)
            while (message := _message(file)) is not None:
                try:
                    # Arrow reads whatever it is given as what it is asked for.
                    if message.type != ("schema" if self._schema is None else "record batch"):
                        raise BadFile(f"{message.type} is nothing that comes here")
                    if self._schema is None:
                        schema = pa.ipc.read_schema(message)
                        _header(self._path, schema)
                        self._schema = schema
                    else:
                        batch, _ = _sound(pa.ipc.read_record_batch(message, self._schema))
                        events += events_of(pa.Table.from_batches([batch]))
                except OtherFormat:
                    raise
                except (*BROKEN, BadFile) as error:
                    self.damage = f"{self._path} cannot be read from here on: {error}"
                    break
                self._at = file.tell()
        return events


def _message(file: pa.NativeFile) -> pa.Message | None:
    """The next message of a stream, None if it is not whole or there is none."""
    try:
        return pa.ipc.read_message(file)
    except BROKEN:
        return None


def _header(path: str, schema: pa.Schema) -> dict[str, Any]:
    metadata = schema.metadata or {}
    if (found := metadata.get(FORMAT, b"none").decode(errors="replace")) != str(VERSION):
        raise OtherFormat(f"{path} has events of version {found}; this package reads version {VERSION}")
    if not schema.equals(COLUMNS):
        raise BadFile(f"{path} cannot be read: its columns are not those of version {VERSION}")
    try:
        header = from_json(metadata.get(HEADER, b""))
    except ValueError as error:
        raise BadFile(f"{path} cannot be read: its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise BadFile(f"{path} cannot be read: its header is no object")
    return header


def events_of(table: pa.Table) -> list[Event]:
    """The rows of a table that `read` gave."""
    return [Event(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)]

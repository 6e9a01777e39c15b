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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from recipe.async_engine.core.events import Event

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


class OtherFormat(ValueError):
    """A record of events is of another version than this one reads."""


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


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], pa.Table]:
    """The header and the events of one file, as far as they are whole; columns as in `COLUMNS`.

    Raises:
        OtherFormat: it is of another version.
    """
    batches = []
    with pa.OSFile(os.fspath(path)) as file:
        try:
            stream = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            # The run ended before anything was written.
            return {}, COLUMNS.empty_table()
        _check_version(path, stream.schema)
        while True:
            try:
                batches.append(stream.read_next_batch())
            except (StopIteration, pa.ArrowInvalid, OSError):
                break
    return json.loads(stream.schema.metadata[HEADER]), pa.Table.from_batches(batches, schema=stream.schema)


class Tail:
    """The events of a file that is being written, as they come."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._at = path, 0
        self._schema: pa.Schema | None = None

    def new(self) -> list[Event]:
        """Those that have come since it was asked last, as far as they are whole.

        Raises:
            OtherFormat: the file is of another version.
        """
        events: list[Event] = []
        with pa.OSFile(os.fspath(self._path)) as file:
            file.seek(self._at)
            while (message := _message(file)) is not None:
                if self._schema is None:
                    self._schema = pa.ipc.read_schema(message)
                    _check_version(self._path, self._schema)
                else:
                    events += events_of(pa.Table.from_batches([pa.ipc.read_record_batch(message, self._schema)]))
                self._at = file.tell()
        return events


def _message(file: pa.NativeFile) -> pa.Message | None:
    """The next message of a stream, None if it is not whole or there is none."""
    try:
        return pa.ipc.read_message(file)
    except (EOFError, pa.ArrowInvalid, OSError):
        return None


def _check_version(path: str | os.PathLike[str], schema: pa.Schema) -> None:
    if (found := (schema.metadata or {}).get(FORMAT, b"none").decode()) != str(VERSION):
        raise OtherFormat(f"{path} has events of version {found}; this package reads version {VERSION}")


def events_of(table: pa.Table) -> list[Event]:
    """The rows of a table that `read` gave."""
    return [Event(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)]

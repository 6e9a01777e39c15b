# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The ledger's journal on disk: SQLite in WAL mode, written by one thread of its own.

Contract. Transitions reach the file in the order in which they were made, each with its group's answers in one
transaction, so that what a killed process leaves is a prefix of its history; `replay` is right for every prefix. The
caller never waits for the disk. A write that fails is raised to the next caller: a run does not go on without its
journal. The size is bounded: answers are kept from a mark to the first publication after it only, transitions between
that publication and the newest one are dropped, and `commit` drops all that precedes a committed checkpoint.

`synchronous=NORMAL`: what is written survives the end of the process, however it ends. A power cut may take the newest
transitions with it, never the order. Shown by tests/integration/test_ledger_journal.py and test_crash_fuzz.py.
"""

import json
import sqlite3
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.journal import Transition, TransitionKind

FILE_NAME = "ledger_journal.sqlite"
MARKED = "marked"
SCHEMA = """
CREATE TABLE IF NOT EXISTS journal (
    seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, version INTEGER, row TEXT, reason TEXT, answers BLOB
);
"""

Result = TypeVar("Result")


class JournalError(RecipeError):
    """The journal cannot be written or read; the cause is chained."""


class SqliteJournal:
    """A `Journal` in one file; see the module's contract.

    Args:
        path: of the file; made if it is not there.
        timeout_s: deadline of everything that waits for the writing thread.
    """

    def __init__(self, path: str | Path, timeout_s: float) -> None:
        self.path = Path(path)
        self.answers_of: Callable[[int], Callable[[], bytes | None]] | None = None
        """By group id, what gives the bytes of a complete group's answers, None where they are lost. The inner call is
        made on the writing thread."""
        self._timeout_s = timeout_s
        self._error: BaseException | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ledger-journal")
        self._seq = 0
        # The first publication since the newest mark: what follows it is of no use to a resumed run.
        self._forgotten_from: int | None = None
        self._wait(self._open)

    # The ledger's side: nothing here waits.

    def append(self, transition: Transition) -> None:
        """Record a transition.

        Raises:
            JournalError: an earlier one could not be written.
        """
        answers = None
        if transition.kind is TransitionKind.READY and self.answers_of is not None:
            assert transition.group_id is not None
            answers = self.answers_of(transition.group_id)
        self._later(lambda: self._append(transition, answers))

    def mark(self) -> str:
        """Name this place."""
        name = uuid.uuid4().hex
        self._later(lambda: self._mark(name))
        return name

    # The trainer's side: these wait until everything before them is on disk.

    def flush(self) -> None:
        """Return when every transition so far is on disk."""
        self._wait(lambda: None)

    def since(self, mark: str | None) -> list[tuple[Transition, bytes | None]] | None:
        """The transitions from a mark to the first publication after it, with the answers of complete groups.

        None where the journal has no such mark: it was not kept then, or is another one.
        """
        return self._wait(lambda: self._since(mark))

    def rewind(self, mark: str) -> None:
        """Keep what `since` gives, and nothing else: the run goes on from there."""
        self._wait(lambda: self._rewind(mark))

    def commit(self, mark: str) -> None:
        """The checkpoint of this mark is complete: what precedes it is not needed any more."""
        self._wait(lambda: self._commit(mark))

    def reset(self, mark: str | None = None) -> None:
        """Begin anew, with nothing but this mark."""
        self._wait(lambda: self._clear(mark))

    def close(self) -> None:
        """Write what is left and end the thread; the journal is of no more use."""
        self._writer.submit(self._connection.close)
        self._writer.shutdown()

    # On the writing thread.

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(self.path, isolation_level=None)
        # Before the first table is made, or it has no effect.
        self._connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(SCHEMA)
        (self._seq,) = self._connection.execute("SELECT coalesce(max(seq), 0) FROM journal").fetchone()

    def _append(self, transition: Transition, answers: Callable[[], bytes | None] | None) -> None:
        published = transition.kind is TransitionKind.PUBLISHED
        content = None if answers is None or self._forgotten_from is not None else answers()
        packed = None if content is None else zlib.compress(content, 1)
        row = None if transition.group is None else json.dumps(list(transition.group))
        self._insert(transition.kind.value, transition.version, row, transition.reason, packed)
        if published and self._forgotten_from is not None:
            self._connection.execute("DELETE FROM journal WHERE seq > ? AND seq < ?", (self._forgotten_from, self._seq))
        elif published:
            self._forgotten_from = self._seq

    def _mark(self, name: str) -> None:
        self._insert(MARKED, None, None, name, None)
        self._forgotten_from = None

    def _insert(self, *values: Any) -> None:
        self._seq += 1
        self._connection.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?)", (self._seq, *values))

    def _place(self, mark: str | None) -> int | None:
        query = "SELECT seq FROM journal WHERE kind = ? AND reason = ?"
        found = self._connection.execute(query, (MARKED, mark)).fetchone()
        return None if found is None else int(found[0])

    def _must_place(self, mark: str) -> int:
        place = self._place(mark)
        if place is None:
            raise JournalError(f"{self.path} has no mark {mark}: another process has written it")
        return place

    def _since(self, mark: str | None) -> list[tuple[Transition, bytes | None]] | None:
        place = self._place(mark)
        if place is None:
            return None
        query = "SELECT kind, version, row, reason, answers FROM journal WHERE seq > ? AND kind != ? ORDER BY seq"
        found = []
        for kind, version, row, reason, answers in self._connection.execute(query, (place, MARKED)):
            if kind == TransitionKind.PUBLISHED.value:
                break
            transition = Transition(TransitionKind(kind), version, json.loads(row), reason)
            found.append((transition, None if answers is None else zlib.decompress(answers)))
        return found

    def _rewind(self, mark: str) -> None:
        place = self._must_place(mark)
        query = "SELECT min(seq) FROM journal WHERE seq > ? AND kind = ?"
        (published,) = self._connection.execute(query, (place, TransitionKind.PUBLISHED.value)).fetchone()
        end = self._seq + 1 if published is None else published
        self._connection.execute(
            "DELETE FROM journal WHERE seq < ? OR seq >= ? OR (seq > ? AND kind = ?)", (place, end, place, MARKED)
        )
        self._forgotten_from = None

    def _commit(self, mark: str) -> None:
        self._connection.execute("DELETE FROM journal WHERE seq < ?", (self._must_place(mark),))
        self._shrink()

    def _clear(self, mark: str | None) -> None:
        self._connection.execute("DELETE FROM journal")
        # Without a checkpoint there is nothing that it could be replayed on.
        self._forgotten_from = self._seq
        if mark is not None:
            self._mark(mark)
        self._shrink()

    def _shrink(self) -> None:
        """Give free pages back to the file system; without it the file keeps its largest size."""
        # A page a step, and `execute` makes one step of what gives no rows.
        self._connection.executescript("PRAGMA incremental_vacuum")
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # Between the threads.

    def _later(self, work: Callable[[], None]) -> None:
        self._raise_error()
        self._writer.submit(work).add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        if not future.cancelled() and future.exception() is not None and self._error is None:
            self._error = future.exception()

    def _wait(self, work: Callable[[], Result]) -> Result:
        future = self._writer.submit(work)
        try:
            result = future.result(self._timeout_s)
        except TimeoutError as error:
            raise JournalError(
                f"{self.path} was not written within {self._timeout_s:g} s (async_training.timeouts.checkpoint)"
            ) from error
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{self.path}: {error}") from error
        self._raise_error()
        return result

    def _raise_error(self) -> None:
        if self._error is not None:
            raise JournalError(f"{self.path} could not be written: {self._error}") from self._error

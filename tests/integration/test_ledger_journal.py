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
"""The journal on disk: order, answers, marks, size, and faults that do not stay silent."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.journal import MARK, JournaledLedger, TransitionKind
from recipe.async_engine.core.prompts import PromptRef
from recipe.async_engine.trainer.ledger_journal import JournalError, SqliteJournal

GATE = GateSettings(batch_groups=2, batches_per_version=1, max_staleness=4, pipeline_depth=4)
SOON = 20.0


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqliteJournal]:
    journal = SqliteJournal(tmp_path / "journal.sqlite", SOON)
    yield journal
    journal.close()


def journaled(journal: SqliteJournal, answer: bytes | None = b"answers") -> JournaledLedger:
    ledger = JournaledLedger(GATE)
    ledger.journal = journal
    journal.answers_of = lambda group_id: lambda: answer and answer + str(group_id).encode()
    return ledger


def complete(ledger: JournaledLedger, count: int) -> None:
    first = ledger.counts().issued
    for n in range(first, first + count):
        group = ledger.issue(PromptRef(n, 0, f"uid-{n}"))
        ledger.mark_ready(group.id, ledger.version)


def train_version(ledger: JournaledLedger) -> None:
    complete(ledger, 2)
    ledger.take()
    ledger.mark_trained()
    ledger.publish()


def size(journal: SqliteJournal) -> int:
    journal.flush()
    return sum(file.stat().st_size for file in journal.path.parent.glob("journal.sqlite*"))


def test_another_process_reads_what_was_written_up_to_the_first_publication(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.sqlite", SOON)
    ledger = journaled(journal)
    mark = ledger.snapshot()[MARK]
    train_version(ledger)
    complete(ledger, 1)
    journal.flush()
    # Not closed: as a killed process leaves it.
    found = SqliteJournal(tmp_path / "journal.sqlite", SOON).since(mark)
    assert found is not None
    kinds = [transition.kind for transition, _ in found]
    issued, ready = TransitionKind.ISSUED, TransitionKind.READY
    assert kinds == [issued, ready, issued, ready, *[TransitionKind.TAKEN] * 2, *[TransitionKind.TRAINED] * 2]
    assert [answers for _, answers in found if answers] == [b"answers0", b"answers1"]
    assert found[0][0].group == [0, 0, 0, "uid-0", 0, "running", 1, None]


def test_journal_without_the_mark_says_so(journal: SqliteJournal) -> None:
    ledger = journaled(journal)
    mark = ledger.snapshot()[MARK]
    assert journal.since("another") is None
    assert journal.since(None) is None
    assert journal.since(mark) == []
    journal.reset("another")
    assert journal.since(mark) is None
    assert journal.since("another") == []


def test_group_whose_answers_are_lost_is_recorded_without(journal: SqliteJournal) -> None:
    ledger = journaled(journal, answer=None)
    mark = ledger.snapshot()[MARK]
    complete(ledger, 1)
    assert [(step.kind.value, answers) for step, answers in journal.since(mark) or []] == [
        ("issued", None),
        ("ready", None),
    ]


def test_run_goes_on_from_what_it_keeps(journal: SqliteJournal) -> None:
    ledger = journaled(journal)
    mark = ledger.snapshot()[MARK]
    train_version(ledger)
    lost = ledger.snapshot()[MARK]
    complete(ledger, 3)
    kept = journal.since(mark)
    journal.rewind(mark)
    assert journal.since(mark) == kept
    assert journal.since(lost) is None
    complete(ledger, 1)
    assert len(journal.since(mark) or []) == len(kept or []) + 2


def test_checkpoint_that_is_not_committed_leaves_the_one_before_it_usable(journal: SqliteJournal) -> None:
    ledger = journaled(journal)
    first = ledger.snapshot()[MARK]
    complete(ledger, 2)
    second = ledger.snapshot()[MARK]
    complete(ledger, 2)
    assert len(journal.since(first) or []) == 8
    journal.commit(second)
    assert journal.since(first) is None
    assert len(journal.since(second) or []) == 4


def test_size_is_bounded_without_and_with_checkpoints(journal: SqliteJournal) -> None:
    answer = bytes(range(256)) * 400
    ledger = journaled(journal, answer)
    mark = ledger.snapshot()[MARK]
    for _ in range(50):
        train_version(ledger)
    early = size(journal)
    for _ in range(500):
        train_version(ledger)
    # The write-ahead log comes and goes with SQLite's own checkpoints, at 1,000 pages of 4 KiB.
    assert size(journal) < early + 5_000_000
    assert len(journal.since(mark) or []) == 8
    connection = sqlite3.connect(journal.path)
    assert connection.execute("SELECT count(*) FROM journal").fetchone()[0] < 25
    sizes = []
    for _ in range(60):
        train_version(ledger)
        journal.commit(ledger.snapshot()[MARK])
        sizes.append(size(journal))
    assert max(sizes[30:]) <= max(sizes[:30])
    assert max(sizes) < 100_000


def test_file_shrinks_when_a_checkpoint_is_committed(journal: SqliteJournal) -> None:
    ledger = journaled(journal, os.urandom(1_000_000))
    ledger.snapshot()
    complete(ledger, 8)
    assert size(journal) > 8_000_000
    journal.commit(ledger.snapshot()[MARK])
    assert size(journal) < 200_000


def test_write_that_fails_ends_the_run_with_its_cause(tmp_path: Path, journal: SqliteJournal) -> None:
    ledger = journaled(journal)
    complete(ledger, 1)
    journal.flush()
    other = sqlite3.connect(journal.path)
    other.execute("DROP TABLE journal")
    other.commit()
    with pytest.raises(JournalError, match=r"journal\.sqlite.*no such table"):
        complete(ledger, 1)
        journal.flush()
    with pytest.raises(JournalError, match="could not be written"):
        complete(ledger, 1)


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="file/journal"):
        SqliteJournal(tmp_path / "file" / "journal.sqlite", SOON)

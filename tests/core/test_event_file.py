# SPDX-License-Identifier: Apache-2.0
"""The record of events on disk is readable at any moment, and a full disk costs what could not be written."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from recipe.async_engine.record import event_file
from recipe.async_engine.record.event_file import EventFile, OtherFormat, Tail, events_of, files, read
from recipe.async_engine.record.events import Event

EVENTS = [
    Event("trainer", "update", 0.0, 1.5),
    Event("groups", "trained", 1.0, 2.0, 0.5, 3, 4, 5, 6, "seven"),
]


def test_what_was_written_is_read_back_while_the_file_is_open(tmp_path: Path) -> None:
    file = EventFile(tmp_path, {"mode": "a"})
    assert read(file.path)[1].num_rows == 0
    file.write(EVENTS)
    header, table, notes = read(file.path)
    assert not notes
    assert (header, events_of(table)) == ({"mode": "a"}, EVENTS)
    file.write([])
    file.write(EVENTS)
    assert events_of(read(file.path)[1]) == EVENTS * 2
    file.close()
    assert events_of(read(file.path)[1]) == EVENTS * 2


def test_of_a_file_that_was_cut_off_whole_batches_are_read(tmp_path: Path) -> None:
    file = EventFile(tmp_path, {})
    sizes = []
    for _ in range(3):
        file.write(EVENTS)
        sizes.append(file.path.stat().st_size)
    content, cut = file.path.read_bytes(), tmp_path / "cut.arrow"
    for length in [*range(0, len(content), 101), *(size - 1 for size in sizes), *sizes]:
        cut.write_bytes(content[:length])
        whole = sum(length >= size for size in sizes)
        assert events_of(read(cut)[1]) == EVENTS * whole, length


def test_each_start_has_a_file_of_its_own_the_newest_last(tmp_path: Path) -> None:
    assert files(tmp_path) == []
    paths = [EventFile(tmp_path, {"start": number}).path for number in range(3)]
    assert files(tmp_path) == paths
    file = EventFile(tmp_path, {})
    file.write(EVENTS)
    assert events_of(read(files(tmp_path)[-1])[1]) == EVENTS


def test_full_disk_ends_nothing_and_what_waits_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "WAITING", 5)
    file = EventFile(tmp_path, {})
    file.write(EVENTS)
    size = file.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
        for _ in range(5):
            file.write(EVENTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.path.stat().st_size == size
    # One batch of two was on its way already, and five events have waited.
    assert file.lost == 3
    file.write([])
    file.close()
    assert len(events_of(read(file.path)[1])) == 2 + 2 + 5


def test_another_versions_record_is_refused_with_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "VERSION", 9)
    file = EventFile(tmp_path, {})
    file.write(EVENTS)
    monkeypatch.undo()
    with pytest.raises(OtherFormat, match="version 9; this package reads version 1"):
        read(file.path)


def test_events_of_a_file_that_grows_come_once_and_only_whole(tmp_path: Path) -> None:
    """A byte more each time: whatever a look finds of a batch, its events come when it is whole, and never again."""
    file = EventFile(tmp_path, {})
    for _ in range(3):
        file.write(EVENTS)
    file.close()
    content = file.path.read_bytes()
    growing, found = tmp_path / "growing.arrow", []
    growing.touch()
    tail = Tail(growing)
    with open(growing, "ab", buffering=0) as copy:
        for at in range(0, len(content), 3):
            copy.write(content[at : at + 3])
            new = tail.new()
            assert new in ([], EVENTS)
            found += new
    assert found == EVENTS * 3 and tail.new() == []


def test_tail_of_another_versions_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "VERSION", 9)
    file = EventFile(tmp_path, {})
    file.write(EVENTS)
    monkeypatch.undo()
    with pytest.raises(OtherFormat, match="version 9"):
        Tail(file.path).new()


def test_what_could_not_be_written_up_to_the_end_is_counted(tmp_path: Path) -> None:
    file = EventFile(tmp_path, {})
    file.write(EVENTS)
    size = file.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
        for _ in range(3):
            file.write(EVENTS)
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.lost == 6
    assert events_of(read(file.path)[1]) == EVENTS


def test_what_waits_is_written_at_the_end_if_there_is_room_by_then(tmp_path: Path) -> None:
    file = EventFile(tmp_path, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
        for _ in range(3):
            file.write(EVENTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()
    assert file.lost == 0
    assert events_of(read(file.path)[1]) == EVENTS * 3


def test_files_that_somebody_else_put_there_are_left_alone(tmp_path: Path) -> None:
    first = EventFile(tmp_path, {}).path
    first.with_name("0000 copy.arrow").write_bytes(first.read_bytes())
    second = EventFile(tmp_path, {}).path
    assert files(tmp_path) == [first, second]

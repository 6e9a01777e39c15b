# SPDX-License-Identifier: Apache-2.0
"""What is written to last is there whole or as it was before, and a failed write leaves nothing beside it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from recipe.async_engine.record import durable


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A limit of the kernel on what this process writes: past it, a write is short, then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_write_takes_a_text_or_what_a_function_writes(tmp_path: Path) -> None:
    durable.write(tmp_path / "a", "one\n")
    durable.write(tmp_path / "a", "two\n")
    durable.write(tmp_path / "b", lambda file: file.write(b"\x00\x01"))
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_bytes()) == ("two\n", b"\x00\x01")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_write_that_the_kernel_cuts_short_leaves_the_older_content_alone(tmp_path: Path) -> None:
    durable.write(tmp_path / "a", "older")
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        durable.write(tmp_path / "a", "x" * 5000)
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "older"


def test_write_whose_content_fails_leaves_the_older_content_alone(tmp_path: Path) -> None:
    durable.write(tmp_path / "a", "older")

    def content(file: BinaryIO) -> None:
        file.write(b"half")
        raise ValueError("cannot be pickled")

    with pytest.raises(ValueError, match="pickled"):
        durable.write(tmp_path / "a", content)
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "older"


def test_content_is_on_the_disk_before_it_has_its_name_and_the_name_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        calls.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    durable.write(tmp_path / "a", "text")
    assert calls == ["sync a.partial", "rename", f"sync {tmp_path.name}"]


def test_removed_folder_is_gone_at_once_and_what_a_kill_left_of_one_goes_with_the_next(tmp_path: Path) -> None:
    for name in ("a", "a.removed"):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / "file").write_text("text")
    durable.remove_tree(tmp_path / "a")
    assert os.listdir(tmp_path) == []

# SPDX-License-Identifier: Apache-2.0
"""Writes files so that a reader finds either the whole new content or the old one, even after a power cut.

Contract: content goes to a file beside its destination, is synced and renamed, and then the folder is synced. A write
that fails, for example on a full disk, raises its ``OSError`` and leaves only the old content. Shown by
tests/core/test_durable.py.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
REMOVED = ".removed"


def write(path: Path, content: str | Callable[[BinaryIO], None]) -> None:
    """Write a text, or whatever a function writes into the file that it is given."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: str | Path) -> None:
    """Wait until the file's content, or the folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until everything below the folder, and the folder itself, are on the disk."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(place)
    sync(folder.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder, which readers see as gone at once. If there is no such folder, do nothing.

    The folder gets another name first. What a kill leaves under that name is removed here too.
    """
    removed = folder.with_name(folder.name + REMOVED)
    if folder.exists():
        shutil.rmtree(removed, ignore_errors=True)
        os.replace(folder, removed)
        sync(folder.parent)
    shutil.rmtree(removed, ignore_errors=not removed.exists())

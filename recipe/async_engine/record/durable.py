# SPDX-License-Identifier: Apache-2.0
"""Writes files that last: a reader, also one after a power cut, finds the whole content or the one before.

Contract: content goes to a file beside its place, is synced, renamed, and the folder is synced. A write that fails, on
a full disk for example, raises its ``OSError`` and leaves the older content and nothing beside it. Shown by
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
    """Write a text, or what a function writes into the file that it gets."""
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
    """Have the file's content, or the folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Have everything below the folder on the disk, and the folder itself."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(place)
    sync(folder.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder at once for those who look for it; what a kill leaves of it has another name, and goes here too.

    Where there is no such folder, it is done already.
    """
    removed = folder.with_name(folder.name + REMOVED)
    if folder.exists():
        shutil.rmtree(removed, ignore_errors=True)
        os.replace(folder, removed)
        sync(folder.parent)
    shutil.rmtree(removed, ignore_errors=not removed.exists())

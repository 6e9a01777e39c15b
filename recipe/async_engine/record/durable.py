# SPDX-License-Identifier: Apache-2.0
"""Writes files so that a reader finds either the whole new content or the whole old one, even after a power cut.

Contract: content is written to a temporary file next to its destination, synced and renamed; then the folder is synced.
A write that fails, for example on a full disk, raises an ``OSError`` and leaves the old content in place. Shown by
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
    """Replace a file's content. ``content`` is a text, or a function that writes to the open file that it is given."""
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
    """Wait until the content of a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything below it are on disk."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(place)
    sync(folder.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder so that readers see it disappear at once. Do nothing if the folder does not exist.

    The folder is renamed first, and its files are deleted afterwards. Files left by an earlier call that was killed are
    removed too.
    """
    removed = folder.with_name(folder.name + REMOVED)
    if folder.exists():
        shutil.rmtree(removed, ignore_errors=True)
        os.replace(folder, removed)
        sync(folder.parent)
    shutil.rmtree(removed, ignore_errors=not removed.exists())

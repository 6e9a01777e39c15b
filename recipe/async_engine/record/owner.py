# SPDX-License-Identifier: Apache-2.0
"""Gives a run's folder one owner at a time, so that a second launch fails before it changes anything.

Contract: the owner holds a kernel lock on ``run.lock`` in the folder, which the kernel releases when the process ends,
however it ends. The lock belongs to the process (``fcntl.lockf``) and not to an open file, so forks, workers and other
children do not inherit it. Two bytes of the file are locked separately: the main process locks one for the run, and the
trainer's process locks the other for the checkpoints. If the main process is killed, the trainer's process may live on
briefly; a new launch waits until it has ended. Over NFS, the lock works between machines if the mount supports locks
(NFSv4, or v3 with lockd). If the file system refuses locks, the run continues with a warning. Shown by
tests/integration/test_owner.py.
"""

import errno
import fcntl
import logging
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from recipe.async_engine.core.errors import RecipeError

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
RUN, CHECKPOINTS = 0, 1
POLL_S = 0.1
TAKEN = (errno.EACCES, errno.EAGAIN)


class FolderTaken(RecipeError):
    """Another run owns the folder."""


def is_owned(folder: str | os.PathLike[str], part: int = RUN) -> bool:
    """Return whether another process owns ``part`` (`RUN` or `CHECKPOINTS`) of a run's folder. Nothing is locked."""
    try:
        with open(Path(folder, LOCK_FILE), "rb") as file:
            # Fields of the kernel's struct flock on 64-bit Linux: type, whence, start, length, process id.
            asked = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, part, 1, 0)
            (found, *_) = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return False
    return bool(found != fcntl.F_UNLCK)


def owner_of(folder: str | os.PathLike[str]) -> str:
    """Return the host name of the present owner of a run's folder, or else of the last one; "" if it is unknown."""
    with suppress(OSError):
        words = Path(folder, LOCK_FILE).read_text(errors="replace").partition(" on ")[2]
        return words.partition(",")[0]
    return ""


class Owner:
    """Owns ``part`` (`RUN` or `CHECKPOINTS`) of a run's existing ``folder`` until `release`, or until the process ends.

    If another process owns it, the constructor waits up to ``wait_s`` seconds for that process to end.

    Raises:
        FolderTaken: another process still owns this part of the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], part: int, wait_s: float = 0.0) -> None:
        self._file = open(Path(folder, LOCK_FILE), "a+b", buffering=0)  # noqa: SIM115 - kept open with the lock
        deadline = time.monotonic() + wait_s
        while not self._locked(part):
            if time.monotonic() >= deadline:
                self._file.seek(0)
                owner = self._file.read().decode(errors="replace").strip() or f"{LOCK_FILE} does not say which"
                self._file.close()
                earlier = "the trainer of an earlier start, which has not ended yet"
                who = f"another run: {owner}" if part == RUN else earlier
                raise FolderTaken(
                    f"trainer.default_local_dir={folder} belongs to {who}. Wait until it ends, end it, or give "
                    "this run another folder."
                )
            time.sleep(POLL_S)
        if part == RUN:
            with suppress(OSError):  # The disk may be full; the lock does not depend on the text.
                self._file.truncate(0)
                since = time.strftime("%F %T %z")
                self._file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())

    def release(self) -> None:
        """Release the lock, so that another launch may use the folder."""
        self._file.close()

    def _locked(self, part: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, part)
        except OSError as error:
            if error.errno in TAKEN:
                return False
            logger.warning(
                "%s cannot be locked (%s): another run could use its folder at the same time", LOCK_FILE, error
            )
        return True

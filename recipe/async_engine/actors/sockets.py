# SPDX-License-Identifier: Apache-2.0
"""Where a run's processes meet: sockets in folders whose paths Linux takes, and ports that nobody else is given.

Contract: a folder of any length can hold sockets by way of `short`, a link to it that stays and is used again; what is
written there lies in the folder itself. Ray ends processes without a last word, so that what they would remove stays.
With Ray's sockets it stays beside Ray's logs of the run, and goes with them.

verl asks the system for a free port and binds it seconds later (verl/single_controller/ray/base.py:91-110). By then one
of Ray's connections may have it, unless it is below the ports that systems give to connections (`rendezvous_ports`).

Shown by tests/integration/test_ray_start.py, test_trainer_group.py and tests/e2e/test_one_step_off.py.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import stat
import tempfile

import ray

from recipe.async_engine.core.errors import RecipeError

LONGEST_PATH = 107
"""Bytes of a socket's path that Linux takes (unix(7))."""
LONGEST_NAME = 40
"""Bytes of what vLLM (a UUID) and multiprocessing (a folder and a file) put there."""
LONGEST_OF_RAY = 72
"""Bytes of what Ray puts into a temporary folder: ``ray``, its session's name, ``sockets`` and a file."""
LINKS = "/tmp/recipe-{user}"
ORDINARY = re.compile(r"[\w./+@%:=,-]+", re.ASCII)
"""Of a folder's path: Ray starts its workers by command lines, which it splits at spaces."""


class UnusableFolder(RecipeError):
    """A folder for temporary files cannot be made or written to, or has too long a path for sockets, and no link."""


def usable(folder: str, named: str) -> str:
    """The whole path of a folder for temporary files, which is made; ``named``: by which setting or variable.

    Raises:
        UnusableFolder: nothing can be put there.
    """
    path = os.path.abspath(folder)
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise UnusableFolder(f"{named}={folder}: no temporary files can be put there ({error}); correct it") from error


def short(folder: str, room: int = LONGEST_OF_RAY) -> str:
    """The folder, or a link to it where paths of ``room`` more bytes in it would be too long, or have spaces.

    Raises:
        UnusableFolder: the links' folder is not this user's alone.
    """
    if len(folder.encode()) + 1 + room <= LONGEST_PATH and ORDINARY.fullmatch(folder):
        return folder
    links = LINKS.format(user=os.getuid())
    link = os.path.join(links, hashlib.sha256(folder.encode()).hexdigest()[:12])
    try:
        os.makedirs(links, mode=0o700, exist_ok=True)
        found = os.lstat(links)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise NotADirectoryError(f"{links} is not a folder that only this user may write to")
        os.makedirs(folder, exist_ok=True)
        try:
            os.symlink(os.path.abspath(folder), link)
        except FileExistsError:
            if os.readlink(link) != os.path.abspath(folder):
                raise
    except OSError as error:
        raise UnusableFolder(
            f"{folder} is too long for sockets, whose paths have {LONGEST_PATH} bytes at most, or has spaces, and no "
            f"link to it can be made ({error}): set TMPDIR, or ray_kwargs.ray_init._temp_dir for Ray's, to a shorter "
            "one"
        ) from error
    return link


def sockets_folder() -> str:
    """Ray's on this node; where Ray is not running, or paths in it would be too long, the system's temporary one."""
    node = ray._private.worker._global_node
    folder = None if node is None else str(node.get_sockets_dir_path())
    fits = folder is not None and len(folder.encode()) + 1 + LONGEST_NAME <= LONGEST_PATH
    return folder if folder is not None and fits else short(tempfile.gettempdir(), LONGEST_NAME)


def rendezvous_ports() -> list[int]:
    """First and last of those that verl's ``RayWorkerGroup`` may try, its ``master_port_range``.

    At random, so that groups that start beside each other look in different places.
    """
    return [random.randrange(16_000, 31_000), 32_000]

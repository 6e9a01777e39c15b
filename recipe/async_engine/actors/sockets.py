# SPDX-License-Identifier: Apache-2.0
"""Socket paths and ports that a run's processes use to connect: paths short enough for Linux, ports that stay free.

Contract: sockets can be put in a folder whose path is too long for them, because `short` returns a symbolic link to the
folder. The link is kept and reused. A process that Ray kills cannot remove its sockets, so they are put in Ray's own
folder, which is removed together with Ray's logs of the run (`sockets_folder`).

verl asks the system for a free port and binds it seconds later (verl/single_controller/ray/base.py:91-110). By then one
of Ray's connections may use the port. `rendezvous_ports` prevents this: its ports are below the range from which
systems choose ports for connections. Shown by tests/integration/test_ray_start.py, test_trainer_group.py and
tests/e2e/test_one_step_off.py.
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
"""Number of bytes that Linux accepts in a socket's path (unix(7))."""
LONGEST_NAME = 40
"""Longest name, in bytes, that an engine (a UUID) or multiprocessing (folder and file) appends to a folder's path."""
LONGEST_OF_RAY = 72
"""Longest suffix, in bytes, that Ray appends to its temporary folder's path: ``ray``, session, ``sockets``, a file."""
LINKS = "/tmp/recipe-{user}"
ORDINARY = re.compile(r"[\w./+@%:=,-]+", re.ASCII)
"""Matches paths that Ray can use in its workers' command lines, which it splits at spaces."""


def usable(folder: str, named: str) -> str:
    """Create a folder for temporary files if it does not exist, and return its absolute path.

    Raises:
        RecipeError: no file can be written in the folder, which the setting or variable ``named`` names.
    """
    path = os.path.abspath(folder)
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise RecipeError(
            f"{named}={folder}: no temporary files can be put there ({error}); name a writable folder"
        ) from error


def short(folder: str, room: int = LONGEST_OF_RAY) -> str:
    """Return the folder, or a link to it if the folder's path has spaces or is too long to add ``room`` bytes.

    Raises:
        RecipeError: no link can be made, for example because other users may write to the folder of the links.
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
        raise RecipeError(
            f"{folder} has spaces or is too long for sockets ({LONGEST_PATH} bytes in a path), and no link to it can "
            f"be made ({error}): set TMPDIR, or ray_kwargs.ray_init._temp_dir for Ray, to a shorter path"
        ) from error
    return link


def sockets_folder() -> str:
    """Return Ray's folder of sockets if its path is short enough, or else the temporary folder (see `short`)."""
    node = ray._private.worker._global_node
    folder = None if node is None else str(node.get_sockets_dir_path())
    fits = folder is not None and len(folder.encode()) + 1 + LONGEST_NAME <= LONGEST_PATH
    return folder if folder is not None and fits else short(tempfile.gettempdir(), LONGEST_NAME)


def rendezvous_ports() -> list[int]:
    """Return the first and last port that verl's ``RayWorkerGroup`` may try (its argument ``master_port_range``).

    The first port is random, so that groups that start at the same time try different ports.
    """
    return [random.randrange(16_000, 31_000), 32_000]

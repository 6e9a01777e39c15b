# SPDX-License-Identifier: Apache-2.0
"""Chooses socket paths that are short enough for Linux, and ports that stay free until a process uses them.

Contract: sockets can be put in a folder whose path is too long for a socket, because `short` returns a symbolic link to
the folder. The link is kept and reused. A process that Ray kills cannot remove its sockets, so they are put in Ray's
own folder, which is removed together with Ray's logs of the run (`sockets_folder`).

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
"""Length in bytes of the longest socket name that an engine (a UUID) or multiprocessing (``folder/file``) uses in the
folder for its sockets.
"""
LONGEST_OF_RAY = 72
"""Length in bytes of the longest socket path that Ray uses below its temporary folder:
``ray/<session>/sockets/<file>``.
"""
LINKS = "/tmp/recipe-{user}"
ORDINARY = re.compile(r"[\w./+@%:=,-]+", re.ASCII)
"""Matches paths that Ray can put into the command line of a worker. Ray splits this line at spaces."""


def usable(folder: str, named: str) -> str:
    """Create a folder for temporary files if it does not exist, and return its absolute path.

    Raises:
        RecipeError: no file can be written in the folder. The message contains ``named``, the setting or environment
            variable that the folder comes from.
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
    """Return ``folder``, or a symbolic link to it if its path has spaces or is too long for sockets.

    A path is too long if a socket's name of ``room`` bytes cannot be appended.

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
    """Return a folder for sockets: Ray's if its path is short enough, or else the temporary folder or a link to it."""
    node = ray._private.worker._global_node
    folder = None if node is None else str(node.get_sockets_dir_path())
    fits = folder is not None and len(folder.encode()) + 1 + LONGEST_NAME <= LONGEST_PATH
    return folder if folder is not None and fits else short(tempfile.gettempdir(), LONGEST_NAME)


def rendezvous_ports() -> list[int]:
    """Return the first and last port that verl's ``RayWorkerGroup`` may try (its argument ``master_port_range``).

    The first port is random, so that groups that start at the same time try different ports.
    """
    return [random.randrange(16_000, 31_000), 32_000]

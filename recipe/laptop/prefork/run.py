# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the fork server of a run, whose forks begin with torch, verl and an engine already imported.

Importing these takes 8 to 18 seconds of CPU time per process, and a run on a laptop has ten processes. Ray
(``py_executable``) and multiprocessing (``set_executable``) are made to start `launcher` instead of the Python
interpreter, and the launcher asks the server process (`server`) for a fork. This is done only for runs without an
accelerator, because accelerator drivers do not survive a fork.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipe.laptop import engines
from recipe.laptop.prefork import launcher

STOP_S = 5.0

# Ray reads two environment variables only when it is imported, so they must already be set in the server. RAY_JOB_ID is
# the job's id; hence a server can serve only one job, the first of its Ray cluster. RAY_RAYLET_PID names the process
# whose death ends a worker: normally the raylet, here the main process, which starts both the raylet and the server.
FIRST_JOB = "01000000"


def ray_environment() -> dict[str, str]:
    return {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}


MODULES = (
    "recipe.async_engine.trainer.base",
    "verl.workers.engine_workers",
    "verl.single_controller.ray.base",
    "verl.experimental.reward_loop",
    "transformers.models.qwen3.modeling_qwen3",
)
"""The modules that the server imports: those whose import takes most of the time when a process starts."""


class Prefork:
    """The fork server of one run. Used as a context manager, it stops the server at the end."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        modules: Sequence[str] = (*MODULES, *engines.MODULES[engines.DEFAULT]),
    ) -> None:
        """Start the server and return at once; it forks processes only after it has imported ``modules``.

        ``environment`` has additional environment variables for the server.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="recipe-"))
        address = self._folder / "socket"
        self.executable = self._folder / "python"
        interpreter = shlex.join([sys.executable, "-S", "-E", launcher.__file__, str(address)])
        self.executable.write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n')
        self.executable.chmod(0o700)
        server = [sys.executable, "-m", "recipe.laptop.prefork.server"]
        with socket.socket(socket.AF_UNIX) as listener, (self._folder / "log").open("w") as log:
            listener.bind(str(address))
            listener.listen(64)
            self._server = subprocess.Popen(
                [*server, str(listener.fileno()), str(self.executable), *modules],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                env={**os.environ, **(environment or {}), **ray_environment()},
                # Ctrl-C must reach only the main process, which then ends the other processes in order.
                start_new_session=True,
            )

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Return the entry for Ray's ``runtime_env`` that makes every worker of a job a fork of the server."""
        return {"py_executable": str(self.executable)}

    def joined(self, job_id: str) -> None:
        """Stop the server if the job ``job_id`` is not the first one of its Ray cluster.

        Without the server, launchers start workers as ordinary processes.
        """
        if job_id != FIRST_JOB:
            self._end_server()

    def stop(self) -> None:
        """Stop the server and remove its files. Running forks continue until they or their launchers end."""
        self._end_server()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_server(self) -> None:
        if self._server.stdin is not None and not self._server.stdin.closed:
            with suppress(BrokenPipeError):  # The server has ended already.
                self._server.stdin.write(b".")
                self._server.stdin.close()
        try:
            self._server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def __enter__(self) -> Prefork:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

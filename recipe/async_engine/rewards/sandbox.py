# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Runs a Python program that nobody trusts, within limits, and says how it ended.

Contract. `run` returns within ``wall_s`` and a moment, whatever the program does, and leaves nothing behind: no
process, no file. The program sees an empty working directory, a minimal environment and Python's standard library. What
keeps it in is in `confine`: resource limits, seccomp and Landlock, none of which needs privileges or a container. Where
the kernel lacks one of the latter two, `run` refuses; a caller who accepts less says so with ``isolation``.

Not a defence against a bug in the kernel: for programs of a determined attacker, use a virtual machine
(docs/security.md). Shown by tests/integration/test_sandbox.py, one test for each way out.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from recipe.async_engine.core.errors import RecipeError, SettingError

CONFINE = Path(__file__).with_name("confine.py")
ISOLATION = ("seccomp", "landlock")
# Not the user's: a program must not find keys, proxies or paths in its environment.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nonexistent"}
SYSTEM_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
SYSTEM_FILES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
CHUNK = 65536


class SandboxUnavailable(RecipeError):
    """This machine lacks what the isolation that was asked for needs."""


class Ending(StrEnum):
    """How a program ended."""

    EXIT = "exit"
    CPU = "cpu limit"
    WALL = "wall limit"
    OUTPUT = "output limit"
    SIGNAL = "signal"


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        wall_s: seconds from its start to its end.
        cpu_s: seconds of CPU time, over all its threads; whole seconds, at least 1.
        memory_bytes: of address space. A program that asks for more gets a MemoryError.
        output_bytes: of standard output and standard error together.
        file_bytes: of any file that it writes; with 0 it can make none. Their number is bounded by time only.
        threads: of the program. The kernel does not hold root to it; there only memory bounds them.
        open_files: at the same time.
    """

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    file_bytes: int = 0
    threads: int = 64
    open_files: int = 64


@dataclass(frozen=True)
class Outcome:
    """What became of a program: how it ended, its exit status (negative: the signal), what it wrote, and how long."""

    ending: Ending
    status: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ending is Ending.EXIT and self.status == 0


def run(
    source: str,
    stdin: str = "",
    limits: Limits | None = None,
    call: tuple[str, Sequence[Any]] | None = None,
    isolation: Sequence[str] = ISOLATION,
) -> Outcome:
    """Run a program.

    Args:
        source: Python.
        stdin: what it reads.
        limits: `Limits()` by default.
        call: call this function of the program, or of its class ``Solution``, with these arguments (JSON), and give its
            result as JSON in place of what the program writes.
        isolation: what must be in force; leave one out to accept its absence.

    Raises:
        SandboxUnavailable: the kernel lacks a part of ``isolation``.
        SettingError: ``isolation`` names something else.
    """
    unknown = set(isolation) - set(ISOLATION)
    if unknown:
        raise SettingError("isolation", list(isolation), f"some of {', '.join(ISOLATION)}")
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="answer") as folder, tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        work = Path(folder) / "work"
        work.mkdir()
        answer = Path(folder) / "answer.py"
        answer.write_text(source, encoding="utf-8", errors="replace")
        settings = {
            "source": str(answer),
            "limits": asdict(limits),
            "isolation": list(isolation),
            "readable": _readable(),
            "parent": os.getpid(),
            "call": None if call is None else {"name": call[0], "arguments": list(call[1])},
        }
        return _run(settings, work, given.fileno(), limits)


def _readable() -> list[str]:
    """What Python needs to import its standard library, and the files that any program may expect."""
    paths = {sysconfig.get_path(name, vars={"base": sys.base_prefix}) for name in ("stdlib", "platstdlib")}
    return [*sorted(path for path in paths if path), *SYSTEM_FOLDERS, *SYSTEM_FILES]


def _run(settings: dict[str, Any], work: Path, stdin: int, limits: Limits) -> Outcome:
    status_read, status_write = os.pipe()
    began = time.monotonic()
    try:
        arguments = [_interpreter(), "-I", "-S", "-B", str(CONFINE), json.dumps({**settings, "status": status_write})]
        process = subprocess.Popen(
            arguments,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=work,
            env=ENVIRONMENT,
            pass_fds=(status_write,),
            start_new_session=True,
        )
    finally:
        os.close(status_write)
    with os.fdopen(status_read, "rb") as status:
        try:
            stdout, stderr, cut = _read(process, limits, began + limits.wall_s)
        finally:
            _end(process)
        confined = status.read()
    seconds = time.monotonic() - began
    if confined[:1] != b"+" and cut is None:
        raise SandboxUnavailable(
            f"the program was not run: {confined.decode() or stderr.decode(errors='replace')[-500:]}. Score on a "
            "machine that has it, or accept less isolation explicitly: reward_kwargs.isolation=[seccomp] or []"
        )
    ending = cut or _ending(process.returncode)
    return Outcome(ending, process.returncode, stdout, stderr, seconds)


def _interpreter() -> str:
    """The interpreter itself: a virtual environment's would look for its own files, which are out of reach."""
    return os.path.realpath(sys.executable)


def _read(process: subprocess.Popen[bytes], limits: Limits, deadline: float) -> tuple[bytes, bytes, Ending | None]:
    """Take in what the program writes until it ends or passes a limit, which is returned."""
    assert process.stdout is not None and process.stderr is not None
    written = {process.stdout: bytearray(), process.stderr: bytearray()}
    cut = None
    with selectors.DefaultSelector() as selector:
        for stream in written:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and cut is None:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                chunk = os.read(key.fd, CHUNK)
                written[key.fileobj] += chunk  # type: ignore[index]
                if not chunk:
                    selector.unregister(key.fileobj)
            if sum(map(len, written.values())) > limits.output_bytes:
                cut = Ending.OUTPUT
            elif time.monotonic() >= deadline:
                cut = Ending.WALL
    if cut is None:
        # It may have closed both and go on.
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            cut = Ending.WALL
    stdout, stderr = (bytes(written[stream]) for stream in (process.stdout, process.stderr))
    return stdout, stderr, cut


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left; without seccomp, that may be processes of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _ending(status: int) -> Ending:
    if status >= 0:
        return Ending.EXIT
    return Ending.CPU if -status == signal.SIGXCPU else Ending.SIGNAL

# SPDX-License-Identifier: Apache-2.0
"""Runs one command as a process of its own, and ends everything that the command started.

Contract: this file is a program that uses only the standard library, so that it starts in milliseconds. It runs the
command line that its arguments give, in the environment and folder in which it runs itself. When the command ends, or
when this program's standard input is closed (also because the process at its other end has died), every process that
descends from the command is killed, even if it has left the command's session or its parent has ended: orphans become
children of this program (``PR_SET_CHILD_SUBREAPER``). Then this program prints a JSON object with the command's exit
status (``status``, negative for a signal), the ends of its outputs (``printed``, ``complained``), and the number of
processes that could not be killed within `KILLED_S` (``left``); or with ``failed``, if the command cannot be started.
It keeps only the last `LAST_WORDS` bytes of an output. Shown by tests/integration/test_agent_runner.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

LAST_WORDS = 4000
KILLED_S = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: list[str]) -> dict[str, object]:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except (OSError, ValueError, IndexError) as error:
        return {"failed": str(error)}
    assert process.stdout is not None and process.stderr is not None
    streams = [process.stdout.fileno(), process.stderr.fileno()]
    words = {stream: b"" for stream in streams}
    for stream in streams:
        os.set_blocking(stream, False)
    ended: dict[int, int] = {}
    while process.pid not in ended:
        ready, _, _ = select.select([0, woken, *streams], [], [])
        if 0 in ready:
            break
        streams = [stream for stream in streams if stream not in ready or _read(stream, words)]
        _reap(woken, ended)
    left = _kill(woken, ended)
    for stream in streams:
        _read(stream, words)
    printed, complained = (text.decode(errors="replace") for text in words.values())
    return {"status": ended.get(process.pid), "printed": printed, "complained": complained, "left": left}


def _read(stream: int, words: dict[int, bytes]) -> bool:
    """Read what is there, up to some MiB, and keep the last bytes; return False if the stream has ended."""
    for _ in range(64):
        try:
            data = os.read(stream, 1 << 16)
        except BlockingIOError:
            break
        if not data:
            return False
        words[stream] = (words[stream] + data)[-LAST_WORDS:]
    return True


def _reap(woken: int, ended: dict[int, int]) -> bool:
    """Collect the exit statuses of the children that have ended; return False if there is no child left."""
    with suppress(BlockingIOError):
        os.read(woken, 1 << 16)
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        return False
    return True


def _kill(woken: int, ended: dict[int, int]) -> int:
    """Kill the children until there are none, since the children of a killed process become this process's children.

    Return how many are left after `KILLED_S`.
    """
    over = time.monotonic() + KILLED_S
    children: list[int] = []  # this process has one thread, whose children are all of them
    while _reap(woken, ended):
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if time.monotonic() > over:
            return len(children)
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        select.select([woken], [], [], 0.1)
    return 0


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])))
    sys.stdout.flush()
    os._exit(0)

# SPDX-License-Identifier: Apache-2.0
"""Replaces the Python interpreter by one that forks from a process which has already imported the stack.

Usage: ``python -S -E launcher.py SOCKET ARGUMENTS...``, where ARGUMENTS are those of ``python``. It imports almost
nothing, since it runs once for every process of a run.

Contract: it passes its arguments, environment, working directory and open files to the server (`server`), and exits
with the status of the forked process when that has ended. The two live and die together: the fork ends itself when its
launcher is gone, and termination signals to the launcher are passed on. Without a server it becomes the plain
interpreter.
"""

import marshal
import os
import signal
import socket
import sys

ANSWER_S = 300
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def open_files(without: int) -> list[int]:
    """Return the open file descriptors of this process, except for ``without``."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            os.fstat(descriptor)
        except OSError:  # the descriptor with which the folder was listed
            continue
        if descriptor != without:
            found.append(descriptor)
    return sorted(found)


def main(path: str, arguments: list[str]) -> int:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_S)
    try:
        connection.connect(path)
    except OSError:
        os.execv(sys.executable, [sys.executable, *arguments])
    files = open_files(without=connection.fileno())
    answers = connection.makefile("rb")
    try:
        socket.send_fds(connection, [b"\0"], files)
        connection.sendall(marshal.dumps((files, os.getcwdb(), arguments, dict(os.environb))))
        pid = marshal.load(answers)
    except (ConnectionError, EOFError):
        log = os.path.join(os.path.dirname(path), "log")
        with open(log) as lines:
            sys.stderr.write(
                f"recipe: the process that workers are forked from has died. Its output:\n{lines.read()}\n"
            )
        return 1
    for number in PASSED_ON:
        signal.signal(number, lambda number, _frame: os.kill(pid, number))
    for descriptor in files:
        if descriptor > 2:
            os.close(descriptor)
    connection.settimeout(None)
    try:
        return marshal.load(answers)
    except (ConnectionError, EOFError):
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

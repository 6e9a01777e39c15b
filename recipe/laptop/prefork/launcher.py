# SPDX-License-Identifier: Apache-2.0
"""A program that replaces the Python interpreter: it asks a fork server to run the given arguments in a new fork.

Usage: ``python -S -E launcher.py SOCKET ARGUMENTS...``, where ARGUMENTS are those of ``python``. The launcher imports
almost nothing, because it runs once for every process of a run.

Contract: the launcher passes its arguments, environment, working directory and open files to the server (`server`),
which has imported large modules already. The server forks a process, which does what ``python ARGUMENTS`` would do. The
launcher passes termination signals on to the fork, and exits with the fork's exit status. The fork ends when its
launcher dies. If no server answers, the launcher becomes the ordinary interpreter.
"""

import marshal
import os
import signal
import socket
import sys

ANSWER_S = 300
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def open_files(without: int) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            os.fstat(descriptor)
        except OSError:  # This descriptor was open only while the folder was listed.
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

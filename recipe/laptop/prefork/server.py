# SPDX-License-Identifier: Apache-2.0
"""A server that imports large modules once, and then forks a process for each `launcher` that connects.

Usage: ``python -m recipe.laptop.prefork.server DESCRIPTOR EXECUTABLE MODULES...``. DESCRIPTOR is the number of a
listening socket, so that launchers can connect before the imports are done. EXECUTABLE is the program that starts a
launcher. The server ends when its standard input is closed, so it never outlives the process that started it. If that
process was killed, the server also removes the folder of the socket.

Contract: a fork runs what ``python ARGUMENTS`` would run, with the launcher's environment, working directory and open
files (under the same descriptor numbers), and with newly seeded random-number generators. The imported modules must not
depend on environment variables that differ between the processes of a run, and must not start threads.

Ray's own random-number generator, which names tasks and objects, cannot be seeded again. If it were used before the
forks, all of them would draw the same names and silently get each other's objects. The server checks that importing the
modules has not used it.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import multiprocessing
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

FILES_AT_MOST = 250
SPARE_DESCRIPTOR = 1000
REQUEST_S = 30
FLAGS_WITH_VALUE = ("-X", "-W")


def receive(connection: socket.socket) -> tuple[list[int], list[int], bytes, list[str], dict[bytes, bytes]]:
    """Read a launcher's request from its connection.

    Returns:
        The launcher's open files, as descriptors of this process; the numbers of these files in the launcher; and the
        launcher's working directory, arguments and environment.
    """
    connection.settimeout(REQUEST_S)
    _, files, _, _ = socket.recv_fds(connection, 1, FILES_AT_MOST)
    with connection.makefile("rb") as stream:
        request = marshal.load(stream)
    connection.setblocking(True)
    return (files, *request)


class Server:
    """Accepts launchers on a socket, forks a process for each, and reports the exit status of each fork."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._launchers: dict[int, socket.socket] = {}

    def serve(self, lifeline: int) -> bool:
        """Fork on request until the file descriptor ``lifeline`` has data or is closed; return whether it had data.

        In a forked process, this method does not return.
        """
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ignore this signal: a process of a rollout engine that fails may send it to its parent, which is this process.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            for source in (self._listener, woken, lifeline):
                selector.register(source, selectors.EVENT_READ)
            self._inherited = (selector, woken, wakes)
            while True:
                for key, _ in selector.select():
                    if key.fileobj == lifeline:
                        return bool(os.read(lifeline, 1))
                    if key.fileobj is woken:
                        woken.recv(64)
                        self._reap()
                    else:
                        self._take(self._listener.accept()[0])

    def _take(self, connection: socket.socket) -> None:
        """Fork a process for a launcher. The fork reads the request, so an invalid one cannot harm the server."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            sys.stderr.write(f"recipe: no process can be forked: {error}\n")
            connection.close()
            return
        if pid == 0:
            self._become(connection)
        self._launchers[pid] = connection
        with suppress(OSError):  # Sending fails if the launcher has died. Its fork notices this by itself and ends.
            connection.sendall(marshal.dumps(pid))

    def _reap(self) -> None:
        while self._launchers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._launchers.pop(pid)
            with suppress(OSError):
                connection.sendall(marshal.dumps(_exit_status(status)))
            connection.close()

    def _become(self, connection: socket.socket) -> None:
        """Turn this fork into the program that the launcher asks for: run it, then exit the process."""
        status = 1
        try:
            # Leave the server's process group, because Ray kills the whole process group of a dead worker.
            os.setsid()
            signal.set_wakeup_fd(-1)
            for each in (signal.SIGCHLD, signal.SIGQUIT):
                signal.signal(each, signal.SIG_DFL)
            self._forget_the_server()
            files, numbers, folder, arguments, environment = receive(connection)
            lifeline = _place_files(files, numbers, keep=connection.detach())
            threading.Thread(target=_end_with_launcher, args=(lifeline,), daemon=True).start()
            os.environb.clear()
            os.environb.update(environment)
            os.chdir(folder)
            _reseed()
            _reread_environment()
            run_as_interpreter(arguments)
            status = 0
        except SystemExit as exit_:
            status = _status_of(exit_)
        except BaseException:  # Print any other error, as the interpreter would.
            traceback.print_exc()
        finally:
            _leave(status)

    def _forget_the_server(self) -> None:
        closing: list[Any] = [self._listener, *self._launchers.values(), *self._inherited]
        for other in closing:
            other.close()
        self._launchers.clear()


def _place_files(files: list[int], numbers: list[int], keep: int) -> int:
    """Move the descriptors ``files`` to the numbers ``numbers``, and the descriptor ``keep`` to an unused number.

    Return the new number of ``keep``.
    """
    import fcntl

    spare = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, SPARE_DESCRIPTOR) for descriptor in files]
    kept = fcntl.fcntl(keep, fcntl.F_DUPFD_CLOEXEC, SPARE_DESCRIPTOR)
    for descriptor in (*files, keep):
        os.close(descriptor)
    for source, number in zip(spare, numbers, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)
    return kept


def _end_with_launcher(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(1)


def _reseed() -> None:
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _reread_environment() -> None:
    """Make modules drop or read again what they read from the environment when they were imported.

    This is not possible for two variables of Ray, which `prefork/run.py` names.
    """
    tempfile.tempdir = None
    if "ray" in sys.modules:
        from ray._raylet import Config

        # Ray's Config copied the environment at import. Call `initialize` to copy it again, as Ray itself does after it
        # has changed a variable (ray/_private/authentication/authentication_token_setup.py).
        Config.initialize("")


def run_as_interpreter(arguments: list[str]) -> None:
    """Run what ``python ARGUMENTS`` would run: a script, a module (``-m``) or code (``-c``). Ignore other options."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        option = arguments[position]
        if option[:2] in ("-c", "-m"):
            value = option[2:] or arguments[position + 1]
            rest = arguments[position + (1 if option[2:] else 2) :]
            if option[:2] == "-m":
                sys.argv = [value, *rest]
                runpy.run_module(value, run_name="__main__", alter_sys=True)
                return
            sys.argv = ["-c", *rest]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(value, "<string>", "exec"), main.__dict__)
            return
        position += 2 if option in FLAGS_WITH_VALUE else 1
    script = arguments[position]
    sys.argv = arguments[position:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _status_of(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    sys.stderr.write(f"{exit_.code}\n")
    return 1


def _leave(status: int) -> None:
    """End this process as the interpreter would: join threads, run exit handlers, flush the output, and exit."""
    import atexit

    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


@contextmanager
def _actor_classes_named_by_the_system() -> Iterator[None]:
    """Within this context, make Ray take the ids of actor classes (ray/actor.py) from the system's random numbers.

    Otherwise, importing modules with actors would use Ray's own generator, which cannot be seeded again in a fork.
    """
    import ray.actor

    drawn_by_ray = ray.actor.ActorClassID

    class DrawnBySystem(drawn_by_ray):  # type: ignore[misc, valid-type]
        @classmethod
        def from_random(cls) -> object:
            return drawn_by_ray(os.urandom(drawn_by_ray.size()))

    ray.actor.ActorClassID = DrawnBySystem
    try:
        yield
    finally:
        ray.actor.ActorClassID = drawn_by_ray


def _check_that_forks_draw_their_own() -> None:
    if _drawn_in_a_fork() == _drawn_in_a_fork():
        raise RuntimeError(
            "an imported module has used Ray's random-number generator, so workers forked from this process would "
            "give different objects the same name; set async_training.prefork_workers=false"
        )


def _drawn_in_a_fork() -> bytes:
    from ray import ObjectRef

    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, ObjectRef.from_random().binary())
        os._exit(0)
    os.close(writing)
    os.wait()
    with os.fdopen(reading, "rb") as drawn:
        return drawn.read()


def main(listener: socket.socket, executable: str, modules: list[str]) -> None:
    """Import ``modules``, then fork on request until standard input is closed.

    ``executable`` is the program that starts a launcher. Forks use it for the processes that they start themselves,
    such as those of a rollout engine.
    """
    with _actor_classes_named_by_the_system():
        for name in modules:
            importlib.import_module(name)
    _check_that_forks_draw_their_own()
    multiprocessing.set_executable(executable)
    # Exclude the existing objects, which are never garbage, from garbage collection. A collection in a fork would write
    # to their memory pages, so that the fork could no longer share these pages with the server.
    gc.collect()
    gc.freeze()
    if not Server(listener).serve(lifeline=sys.stdin.fileno()):
        shutil.rmtree(os.path.dirname(executable), ignore_errors=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3:])
    # Exit at once, because some of the imported modules print errors during the interpreter's shutdown.
    os._exit(0)

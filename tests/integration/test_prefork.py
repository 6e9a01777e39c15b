# SPDX-License-Identifier: Apache-2.0
"""Forked stand-ins for the interpreter: they behave as `python` does, for the shell, multiprocessing and Ray."""

from __future__ import annotations

import json
import marshal
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from surroundings import ray_folder

from recipe.laptop.prefork.run import MODULES, Prefork
from recipe.laptop.prefork.server import REQUEST_S

# Nothing else here imports it, so a process that has it was forked from the server.
MARK = "colorsys"
SHOW_MARK = f"import sys; print({MARK!r} in sys.modules)"
RUN_S = 240


@pytest.fixture(scope="module")
def prefork() -> Iterator[Prefork]:
    with Prefork({"RECIPE_TEST": "server"}, modules=[MARK, "ray", "numpy"]) as running:
        yield running


def run(prefork: Prefork, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(prefork.executable), *arguments], capture_output=True, text=True, timeout=RUN_S, check=False, **options
    )


def test_code_modules_and_scripts_run_as_they_do_in_python(prefork: Prefork, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os\nprint(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ['RECIPE_TEST'])\n"
    )
    environment = {**os.environ, "RECIPE_TEST": "launcher"}
    for arguments in (["-B", "-c", "import sys; print(sys.argv, __name__)", "x"], ["-u", str(script), "--flag", "y"]):
        stock = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
        )
        assert run(prefork, *arguments, cwd=tmp_path, env=environment).stdout == stock.stdout != ""
    assert "{" in run(prefork, "-m", "json.tool", input='{"a": 1}').stdout
    assert run(prefork, "-c", SHOW_MARK).stdout == "True\n"


def test_the_end_of_a_fork_is_the_end_of_its_launcher(prefork: Prefork) -> None:
    assert run(prefork, "-c", "raise SystemExit(3)").returncode == 3
    assert run(prefork, "-c", "import os; os.kill(os.getpid(), 9)").returncode == 128 + signal.SIGKILL
    failed = run(prefork, "-c", "raise ValueError('no such thing')")
    assert failed.returncode == 1
    assert "ValueError: no such thing" in failed.stderr
    assert run(prefork, "-c", "import atexit; atexit.register(print, 'left')").stdout == "left\n"


def test_a_fork_ends_with_its_launcher_and_gets_its_signals(prefork: Prefork, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "def leave(*_):\n"
        "    raise SystemExit(7)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    for number, status in ((signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)):
        launcher = subprocess.Popen([str(prefork.executable), "-c", code], stdout=subprocess.PIPE, text=True)
        assert launcher.stdout is not None
        fork = int(launcher.stdout.readline())
        launcher.send_signal(number)
        assert launcher.wait(RUN_S) == status
        deadline = time.monotonic() + 10
        while os.path.exists(f"/proc/{fork}"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        launcher.stdout.close()


def test_open_files_keep_their_numbers_and_random_numbers_differ(prefork: Prefork) -> None:
    reading, writing = os.pipe()
    code = f"import os, random, numpy; os.write({writing}, b'%f %f\\n' % (random.random(), numpy.random.rand()))"
    for _ in range(2):
        assert run(prefork, "-c", code, pass_fds=[writing]).returncode == 0
    os.close(writing)
    with os.fdopen(reading) as lines:
        first, second = lines.read().splitlines()
    assert not set(first.split()) & set(second.split())


DRAWN = "import ray; print(ray.ObjectRef.from_random().hex())"
ACTOR_CLASS = "import ray\n\n\n@ray.remote\nclass Actor:\n    pass\n"


def drawn_in_forks(modules: list[str], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """What two forks of a server that has imported ``modules``, some of them in ``folder``, draw."""
    with Prefork({"PYTHONPATH": str(folder)}, modules=modules) as prefork:
        return [run(prefork, "-c", DRAWN) for _ in range(2)]


@pytest.mark.parametrize("own_module", [True, False])
def test_forks_draw_names_of_their_own_for_objects(own_module: bool, tmp_path: Path) -> None:
    """With an actor class in an imported module, and with all that a run imports."""
    (tmp_path / "with_actor_class.py").write_text(ACTOR_CLASS)
    first, second = drawn_in_forks(["with_actor_class"] if own_module else [*MODULES], tmp_path)
    assert len(first.stdout) == len(second.stdout) == 57
    assert first.stdout != second.stdout


def test_modules_that_leave_forks_the_same_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text("import ray\n\nray.ObjectRef.from_random()\n")
    first, _ = drawn_in_forks(["draws"], tmp_path)
    assert first.returncode == 1
    assert "async_training.prefork_workers=false" in first.stderr


def test_upstream_still_uses_its_generator_for_actor_classes(tmp_path: Path) -> None:
    """Without that, `server._actor_classes_named_by_the_system` can go."""
    code = f"""
import os
{ACTOR_CLASS}
for _ in range(2):
    if os.fork() == 0:
        print(ray.ObjectRef.from_random().hex(), flush=True)
        os._exit(0)
    os.wait()
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=RUN_S, check=True)
    first, second = printed.stdout.split()
    assert first == second


def test_launchers_that_send_nothing_or_nonsense_delay_nobody(prefork: Prefork) -> None:
    address = str(prefork.executable.parent / "socket")
    bad = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    try:
        for connection in bad:
            connection.connect(address)
        # Of these four: one says nothing, one leaves in mid-sentence, one lies about lengths, one is no request at all.
        bad[1].sendall(b"\0" + marshal.dumps((1, 2))[:-1])
        bad[1].close()
        bad[2].sendall(b"\0s" + struct.pack("<i", 2**31 - 1))
        bad[3].sendall(b"\0" + marshal.dumps(0))
        began = time.monotonic()
        assert run(prefork, "-c", SHOW_MARK).stdout == "True\n"
        assert time.monotonic() - began < REQUEST_S / 2
        assert prefork._server.poll() is None
    finally:
        for connection in bad:
            connection.close()


def test_without_a_server_it_is_the_plain_interpreter() -> None:
    prefork = Prefork({}, modules=[MARK])
    prefork._server.kill()
    prefork._server.wait()
    assert run(prefork, "-c", SHOW_MARK).stdout == "False\n"
    prefork.stop()
    assert not prefork.executable.exists()


def test_any_job_but_a_clusters_first_gets_plain_interpreters() -> None:
    with Prefork({}, modules=[MARK]) as prefork:
        prefork.joined("01000000")
        assert run(prefork, "-c", SHOW_MARK).stdout == "True\n"
        prefork.joined("02000000")
        assert run(prefork, "-c", SHOW_MARK).stdout == "False\n"


def test_of_a_process_that_is_killed_no_folder_stays() -> None:
    code = (
        "import os; from recipe.laptop.prefork.run import Prefork; "
        "prefork = Prefork(modules=['ray']); print(prefork.executable.parent, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=False)
    folder = Path(killed.stdout.strip())
    assert killed.returncode == -signal.SIGKILL
    assert folder.name.startswith("recipe-")
    deadline = time.monotonic() + RUN_S
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_server_that_cannot_import_says_so() -> None:
    with Prefork({}, modules=["no_such_module"]) as prefork:
        failed = run(prefork, "-c", SHOW_MARK)
    # Too late to connect, and the interpreter is plain; in time, and the cause is told.
    assert failed.stdout == "False\n" or (failed.returncode == 1 and "no_such_module" in failed.stderr)


SPAWN = f"""
import multiprocessing
code = "import sys; sys.exit(7 if {MARK!r} in sys.modules else 1)"
process = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
process.start()
process.join()
print(process.exitcode)
"""


def test_what_a_fork_spawns_is_a_fork(prefork: Prefork) -> None:
    assert run(prefork, "-c", SPAWN).stdout == "7\n"


RAY_JOB = f"""
import json, sys, ray
from recipe.laptop.prefork.server import REQUEST_S
from recipe.laptop.prefork.run import Prefork
from recipe.async_engine.run.ray_start import start_own

class Actor:
    def look(self):
        import os
        return {MARK!r} in sys.modules, os.environ["RECIPE_OWN"]

    def leave(self):
        import os
        os._exit(1)

with Prefork({{}}, modules=[{MARK!r}, "ray"]) as prefork:
    start = {{"num_cpus": 2, "include_dashboard": False, "_temp_dir": sys.argv[1]}}
    start_own({{**start, "runtime_env": prefork.runtime_env}}, 300.0)
    prefork.joined(ray.get_runtime_context().get_job_id())
    actor_class = ray.remote(Actor).options(runtime_env={{"env_vars": {{"RECIPE_OWN": "of the actor"}}}})
    actor = actor_class.remote()
    seen = [ray.get(actor.look.remote(), timeout={RUN_S})]
    try:
        ray.get(actor.leave.remote(), timeout={RUN_S})
    except ray.exceptions.RayActorError:
        seen.append("its death is seen")
    seen.append(ray.get(actor_class.remote().look.remote(), timeout={RUN_S}))
    ray.shutdown()
# To a file, since Ray writes where this process does, in the middle of a line too.
with open(sys.argv[2], "w") as file:
    json.dump(seen, file)
"""


def test_workers_of_ray_are_forks(tmp_path: Path) -> None:
    with ray_folder() as folder:
        finished = subprocess.run(
            [sys.executable, "-c", RAY_JOB, str(folder), str(tmp_path / "seen")],
            capture_output=True,
            text=True,
            timeout=3 * RUN_S,
            check=False,
        )
    assert finished.returncode == 0, finished.stderr
    own = [True, "of the actor"]
    assert json.loads((tmp_path / "seen").read_text()) == [own, "its death is seen", own]

# SPDX-License-Identifier: Apache-2.0
"""Ray's start: as patient as the setting says, and with sockets whose paths Linux takes wherever they are to be."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf
from ray._private import services

from recipe.async_engine.actors import sockets
from recipe.async_engine.actors.sockets import LONGEST_PATH, short
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.run.ray_start import FOLDERS, patience, shorten_folders, start_own

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A folder whose path has more than 100 characters."""
    folder = tmp_path / "of" / ("a-long-name" * 8)
    folder.mkdir(parents=True)
    assert len(str(folder)) > 100
    return folder


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's links are made."""
    folder = Path(tempfile.mkdtemp(prefix="r-"))
    monkeypatch.setattr(sockets, "LINKS", str(folder / "{user}"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process that has this name."""
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    child = subprocess.Popen([program, "60"])
    yield child
    child.kill()
    child.wait()


def test_node_that_is_known_late_is_waited_for(
    raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    known_at = time.monotonic() + 0.7

    def get_node(address: str, node: str) -> dict[str, str]:
        if time.monotonic() < known_at:
            raise RuntimeError("No node info found")
        return {"node": node}

    monkeypatch.setattr(services, "get_node", get_node)
    with patience(30.0):
        assert services.get_node("address", "id") == {"node": "id"}
    assert services.get_node is get_node


@pytest.mark.parametrize("over", ["its process is gone", "the time is over"])
def test_node_that_will_not_be_known_is_given_up(
    over: str, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_node(address: str, node: str) -> None:
        raise RuntimeError("No node info found")

    monkeypatch.setattr(services, "get_node", get_node)
    if over == "its process is gone":
        raylet.kill()
    began = time.monotonic()
    with patience(0.5 if over == "the time is over" else 60.0), pytest.raises(RuntimeError, match="No node info"):
        services.get_node("address", "id")
    assert time.monotonic() - began < 30


def test_start_that_ray_gives_up_is_made_again_without_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[subprocess.Popen[bytes]] = []
    kept = subprocess.Popen(["sleep", "60"])

    def init(**arguments: object) -> None:
        if len(left) < 2:
            left.append(subprocess.Popen(["sleep", "60"]))
            raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "init", init)
    try:
        start_own({}, 60.0)
        assert len(left) == 2
        assert [process.wait(10) for process in left] == [-9, -9]
        assert kept.poll() is None
        with pytest.raises(ValueError, match="of another kind"):
            monkeypatch.setattr(ray, "init", lambda: (_ for _ in ()).throw(ValueError("of another kind")))
            start_own({}, 60.0)
        left.clear()
        monkeypatch.setattr(ray, "init", init)
        with pytest.raises(Exception, match="timed out during startup"):
            start_own({}, 0.0)
    finally:
        for process in (*left, kept):
            process.kill()
            process.wait()


def test_sockets_fit_into_a_folder_of_any_length(deep: Path) -> None:
    folder = short(str(deep))
    assert folder == short(str(deep))
    assert Path(folder).resolve() == deep.resolve()
    assert short("/tmp/x") == "/tmp/x"
    name = "s" * (LONGEST_PATH - len(folder) - 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/{name}")
        assert (deep / name).exists()


def test_link_of_somebody_else_is_not_used(deep: Path, links: Path, tmp_path: Path) -> None:
    (links / str(os.getuid())).mkdir(mode=0o777)
    (links / str(os.getuid())).chmod(0o777)
    with pytest.raises(RecipeError, match=r"set TMPDIR, or ray_kwargs\.ray_init\._temp_dir"):
        short(str(deep))
    (links / str(os.getuid())).chmod(0o700)
    link = Path(short(str(deep)))
    link.unlink()
    link.symlink_to(tmp_path)
    with pytest.raises(RecipeError):
        short(str(deep))


@pytest.mark.parametrize("name", ["a b", "\u00e9", "~"])
def test_a_folder_whose_path_is_no_plain_one_has_a_link(name: str, tmp_path: Path) -> None:
    (folder := tmp_path / name).mkdir()
    link = short(str(folder), room=0)
    assert link != str(folder) and Path(link).samefile(folder)


@pytest.mark.parametrize("named", ["TMPDIR", "RAY_TMPDIR", "ray_kwargs.ray_init._temp_dir"])
def test_a_temporary_folder_that_cannot_be_used_is_refused_by_name(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in FOLDERS:
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")

    def shortened(value: str) -> str:
        ray_init = OmegaConf.create({"_temp_dir": None})
        if named in FOLDERS:
            monkeypatch.setenv(named, value)
        else:
            ray_init._temp_dir = value
        shorten_folders(ray_init)
        return str(os.environ.get(named) if named in FOLDERS else ray_init._temp_dir)

    with pytest.raises(RecipeError, match=re.escape(f"{named}=file")):
        shortened("file")
    with pytest.raises(RecipeError, match=re.escape(f"{named}=/proc/1/x")):
        shortened("/proc/1/x")
    # Processes of a run have other working directories.
    assert os.path.isabs(shortened("relative")) and Path(shortened("relative")).samefile(tmp_path / "relative")
    assert shortened("") in ("None", "")


def test_folders_of_a_run_are_short_ones(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(name, str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    ray_init = OmegaConf.create({"_temp_dir": str(deep / "ray")})
    shorten_folders(ray_init)
    for folder in (os.environ["TMPDIR"], os.environ["RAY_TMPDIR"], ray_init._temp_dir, tempfile.gettempdir()):
        assert len(folder) < 60
    assert Path(tempfile.gettempdir()).resolve() == deep.resolve()
    nothing = OmegaConf.create({"_temp_dir": None, "num_cpus": 2})
    shorten_folders(nothing)
    assert nothing == {"_temp_dir": None, "num_cpus": 2}


STARTS = """
import sys
from omegaconf import OmegaConf
import ray
from recipe.async_engine.run.ray_start import patience, shorten_folders
ray_init = OmegaConf.create({"_temp_dir": sys.argv[1] or None})
shorten_folders(ray_init)
with patience(300.0):
    ray.init(num_cpus=1, include_dashboard=False, **ray_init)
from recipe.async_engine.actors.sockets import sockets_folder
print("sockets", len(sockets_folder()), ray.get(ray.remote(lambda: 42).remote()))
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("temp_dir", [True, False], ids=["ray's own folder", "TMPDIR alone"])
def test_ray_starts_in_folders_of_any_length(temp_dir: bool, deep: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(deep), "PYTHONPATH": str(CHECKOUT)}
    environment.pop("RAY_TMPDIR", None)
    command = [sys.executable, "-c", STARTS, str(deep / "r") if temp_dir else ""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    length, answer = done.stdout.split("sockets ")[1].split()[:2]
    assert (int(length) < 67, answer) == (True, "42")
    assert list(deep.glob("r*/session_*"))


DIES = """
import psutil, threading, time
from recipe.async_engine.run.ray_start import start_own
import ray

def end_the_first_node():
    while not (found := [p for p in psutil.Process().children() if p.name() == "raylet"]):
        time.sleep(0.05)
    found[0].kill()
    print("ended", flush=True)

threading.Thread(target=end_the_first_node, daemon=True).start()
began = time.monotonic()
start_own({"num_cpus": 1, "include_dashboard": False}, 300.0)
print("took", time.monotonic() - began, ray.get(ray.remote(lambda: 42).remote()))
ray.shutdown()
"""


@pytest.mark.slow
def test_start_whose_node_dies_is_made_again_and_not_waited_for(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_TMPDIR": tempfile.mkdtemp(prefix="r-"), "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-c", DIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ended")
    seconds, answer = done.stdout.split("took ")[1].split()
    assert (float(seconds) < 200, answer) == (True, "42")
    assert "it is started once more" in done.stderr

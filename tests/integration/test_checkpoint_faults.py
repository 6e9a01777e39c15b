# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on a file system that fails: the newest complete one is found, and none that was complete is ever lost.

Real files, and the real code that writes, finds, keeps and removes them. Below it, at each change of the file system,
a life of a run may end at once, its disk may be full from then on, or the power may be cut, which empties what was not
synced. In the place of verl's save stand files of a model, and verl's tracker, which is written last and not
atomically. Between lives files are damaged and settings changed.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from checkpointed import plan, snapshot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipe.async_engine.trainer import checkpoints
from recipe.async_engine.trainer.checkpoints import MARKER, TRACKER, RunState

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
CHANGES = ("replace", "rename", "unlink", "rmdir", "mkdir", "truncate")
Content = dict[str, bytes]


class Killed(BaseException):
    """The process has ended here."""


class Disk:
    """The file system below one life: counts its changes, and fails from the chosen one on.

    Args:
        fault: "kill", "power" or "full"; None for a disk that works.
        at: how many changes succeed before.
    """

    def __init__(self, root: Path, fault: str | None, at: int) -> None:
        self._root, self._fault, self._left = str(root), fault, at
        self._unsynced: set[str] = set()
        self._real = {name: getattr(os, name) for name in (*CHANGES, "fsync")}
        self._open = builtins.open
        self.failed = False

    def __enter__(self) -> Disk:
        for name in CHANGES:
            setattr(os, name, self._around(self._real[name]))
        os.fsync = self._fsync
        builtins.open = self._opened
        return self

    def __exit__(self, *_: Any) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        builtins.open = self._open
        if self.failed and self._fault == "power":
            for name in self._unsynced:
                if os.path.isfile(name):
                    self._real["truncate"](name, 0)

    def _due(self) -> bool:
        """Whether this change fails."""
        self.failed = self.failed or (self._fault is not None and self._left <= 0)
        self._left -= 1
        return self.failed

    def _fail(self) -> None:
        if self._fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise Killed

    def _around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        # A full disk keeps nobody from giving names and removing.
        grows = real.__name__ == "mkdir"

        def change(*args: Any, **kwargs: Any) -> Any:
            if self._due() and (grows or self._fault != "full"):
                self._fail()
            if real.__name__ in ("replace", "rename") and str(args[0]) in self._unsynced:
                self._unsynced.add(str(args[1]))
            return real(*args, **kwargs)

        return change

    def _fsync(self, descriptor: int) -> None:
        # Nothing is synced really: it would only take its time.
        if self._due() and self._fault != "full":
            self._fail()
        self._unsynced.discard(os.readlink(f"/proc/self/fd/{descriptor}"))

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not str(file).startswith(self._root) or not set(mode) & set("wxa") or str(file).endswith(".lock"):
            return self._open(file, mode, *args, **kwargs)
        if self._due() and self._fault != "full":
            self._fail()
        self._unsynced.add(str(file))
        return Written(self, self._open(file, mode, *args, **kwargs))


class Written:
    """A file whose writes may fail half-way."""

    def __init__(self, disk: Disk, file: BinaryIO) -> None:
        self._disk, self._file = disk, file

    def write(self, data: bytes) -> int:
        if self._disk._due():
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._disk._fail()
        return self._file.write(data)

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def content_of(folder: Path) -> Content:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class Run:
    """A run's folder over its lives, and what it must hold.

    Attributes:
        complete: content of each checkpoint of its history that must be there, by step.
        others: content of those that must be there under any name: the user went back to one before them.
        cut_off: the step whose save did not return, and those that retention may have removed after it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.saves = 0
        self.complete: dict[int, Content] = {}
        self.others: list[Content] = []
        self.cut_off: tuple[int, list[int]] | None = None

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def state(self, keep: int | None) -> RunState:
        config = {"default_local_dir": str(self.root), "save_freq": 1, "resume_mode": "auto"}
        trainer = OmegaConf.create({"trainer": config | {"max_actor_ckpt_to_keep": keep}})
        return RunState(trainer, plan(), {})

    def save(self, state: RunState, step: int, keep: int | None) -> None:
        self.saves += 1
        token, folder = self.saves, self.folder(step)
        older = sorted((other for other in self.complete if other < step), reverse=True)
        going = older[keep - 1 :] if keep else []
        self.cut_off = None if step in self.complete else (step, going)

        def save_verl() -> None:
            (folder / "actor" / "huggingface").mkdir(parents=True, exist_ok=True)
            for name in ("actor/model_rank_0.pt", "actor/huggingface/config.json", "data.pt"):
                with open(folder / name, "wb") as file:
                    file.write(f"{name} {token}".encode() * 20)
            with open(self.root / TRACKER, "wb") as file:
                file.write(str(step).encode())

        state.save(step, snapshot(token=token), save_verl)()
        if self.cut_off is not None:
            self.complete = {other: self.complete[other] for other in self.complete if other not in going}
            self.complete[step] = content_of(folder)
            self.cut_off = None
        assert checkpoints.tracked(self.root) == step

    def check(self, found: str | None) -> int:
        """What a life has found is the newest complete checkpoint, and the others are there; returns its step."""
        step = -1 if found is None else int(found.rpartition("_")[2])
        if self.cut_off is not None and step == self.cut_off[0]:
            for other in self.cut_off[1]:
                if not self.folder(other).exists():
                    del self.complete[other]
            self.complete[step] = content_of(self.folder(step))
        self.cut_off = None
        assert step == max(self.complete, default=-1)
        assert checkpoints.tracked(self.root) == (None if step < 0 else step)
        self.check_kept()
        return step

    def look(self) -> None:
        """Check what a start finds on a disk that works."""
        with Disk(self.root, None, 0):
            self.check(self.state(None).find())

    def check_kept(self) -> None:
        for other, content in self.complete.items():
            assert content_of(self.folder(other)) == content, other
        there = [content_of(folder) for folder in self.root.glob("global_step_*")]
        assert all(content in there for content in self.others)

    def beyond(self) -> list[int]:
        """Steps past the newest of its history that have a folder."""
        steps = [int(match[1]) for name in os.listdir(self.root) if (match := checkpoints.FOLDER.fullmatch(name))]
        return [step for step in steps if step > max(self.complete, default=-1)]

    def go_back(self) -> None:
        """The user has the run go on from its oldest checkpoint."""
        step = min(self.complete)
        self.others += [content for other, content in self.complete.items() if other > step]
        self.complete = {step: self.complete[step]}
        (self.root / TRACKER).write_text(str(step))

    def damage(self, how: str) -> None:
        """Harm the newest checkpoint."""
        step = max(self.complete)
        folder = self.folder(step)
        victim = {
            "marker": folder / MARKER,
            "content": folder / checkpoints.ROLLOUT_STATE,
            "shard": folder / "actor" / "model_rank_0.pt",
            "config": folder / "actor" / "huggingface" / "config.json",
        }[how]
        content = bytearray(victim.read_bytes())
        if how in ("shard", "config"):
            victim.unlink()
        elif how == "marker":
            victim.write_bytes(content[: len(content) // 2])
        else:
            content[len(content) // 2] ^= 0xFF
            victim.write_bytes(content)
        del self.complete[step]


LIVES = st.lists(
    st.fixed_dictionaries(
        {
            "steps": st.integers(0, 3),
            "stop": st.booleans(),
            "keep": st.sampled_from([None, 1, 2]),
            "fault": st.sampled_from([None, "kill", "power", "full"]),
            "at": st.integers(0, 260),
            "then": st.sampled_from([None, None, "marker", "shard", "content", "config", "back", "tracker"]),
        }
    ),
    min_size=1,
    max_size=6,
)


def live(run: Run, life: dict[str, Any]) -> None:
    """One start: the run resumes, saves after each of its steps, and once more where it is stopped."""
    with Disk(run.root, life["fault"], life["at"]) as disk:
        try:
            state = run.state(life["keep"])
            step = run.check(state.find())
            for _ in range(life["steps"]):
                step = max(step, 0) + 2
                run.save(state, step, life["keep"])
            if life["stop"] and step >= 0:
                run.save(state, step, life["keep"])
        except (Killed, OSError, RuntimeError):  # torch's, where one of the others ends its write
            assert disk.failed


def go_on(lives: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        run = Run(Path(folder))
        for life in lives:
            live(run, life)
            run.look()
            if life["then"] == "back" and run.complete:
                run.go_back()
            elif life["then"] == "tracker" and not run.beyond():
                (run.root / TRACKER).write_bytes(b"")
            elif life["then"] in ("marker", "shard", "content", "config") and len(run.complete) > 1:
                run.damage(life["then"])
        run.look()


@settings(max_examples=100, suppress_health_check=list(HealthCheck), database=None)
@given(LIVES)
def test_newest_complete_checkpoint_is_found_and_none_is_lost(lives: list[dict[str, Any]]) -> None:
    go_on(lives)


@pytest.mark.slow
@settings(max_examples=10_000, suppress_health_check=list(HealthCheck), database=None)
@given(LIVES)
def test_newest_complete_checkpoint_is_found_and_none_is_lost_in_10_000_cases(lives: list[dict[str, Any]]) -> None:
    go_on(lives)


@pytest.mark.parametrize("fault", ["kill", "power", "full"])
def test_newest_complete_checkpoint_is_found_whichever_change_of_the_disk_fails(fault: str) -> None:
    before = {"steps": 2, "stop": True, "keep": 1, "fault": None, "at": 0, "then": None}
    # A save has some 80 changes.
    for at in range(175):
        go_on([before, {**before, "fault": fault, "at": at}, {**before, "steps": 1}])


ON_A_SMALL_DISK = """
import errno, json, os, sys
from pathlib import Path
from checkpointed import snapshot
from test_checkpoint_faults import Run

run = Run(Path(sys.argv[1]))
state = run.state(None)
state.find()
run.save(state, 2, None)

def save(size):
    def save_verl():
        (run.folder(4) / "model.pt").write_bytes(bytes(size))
    state.save(4, snapshot(), save_verl)()

try:
    save(8 << 20)
except OSError as error:
    said = error.errno == errno.ENOSPC
left = sorted(os.listdir(run.root))
run.cut_off = None
found = [run.check(run.state(None).find())]
save(1 << 10)
found.append(int(run.state(None).find().rpartition("_")[2]))
print(json.dumps([said, left, found]))
"""


def test_full_disk_costs_no_complete_checkpoint_and_leaves_room_for_the_next(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = f"mount -t tmpfs -o size=4m none {disk} || exit 77"
    script = tmp_path / "script.py"
    script.write_text(ON_A_SMALL_DISK)
    command = f"{mounted}; exec {sys.executable} {script} {disk}"
    finished = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    if "unshare:" in finished.stderr or finished.returncode == 77:
        pytest.skip(f"no disk can be mounted here: {finished.stderr.strip()}")
    assert finished.returncode == 0, finished.stderr[-3000:]
    said, left, found = json.loads(finished.stdout.splitlines()[-1])
    assert said
    assert left == ["global_step_2", TRACKER, "run.lock"]
    assert found == [2, 4]

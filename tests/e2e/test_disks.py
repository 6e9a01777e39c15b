# SPDX-License-Identifier: Apache-2.0
"""The disk of a run's folder is full, or can't be written to: what needs no disk goes on, the rest ends with its cause.

The disk is a file system of a few MiB, mounted for the test; Ray and what the main says have the machine's own.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from drilled_run import STOP, DrilledRun, check_books, committed_steps, drilled
from main_runs import FULLY_ASYNC, FinishedRun, small

from recipe.laptop.task import TaskPaths

GROUPS = 4
DISK_MIB = 48
SLACK_S = 60.0
STALL_S = 15
WITHOUT_DISK_S = 8.0
FILL_S = 0.05


def mount(*arguments: str) -> None:
    mounted = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of `DISK_MIB`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "drill", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Another user of the disk takes each byte of it, also those that the run gives back."""
    over = threading.Event()
    filler = disk / "filler"

    def fill() -> None:
        with filler.open("ab", buffering=0) as file:
            while not over.wait(FILL_S):
                with suppress(OSError):
                    while True:
                        file.write(bytes(4096))

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        filler.unlink()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """What is opened from now on; a file system with open files can't be made read-only as a whole."""
    mount("--bind", str(disk), str(disk))
    mount("-o", "remount,bind,ro", str(disk))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def ends_with(run: DrilledRun, cause: str, deadline_s: float) -> FinishedRun:
    finished = run.end_within(deadline_s + SLACK_S)
    assert finished.returncode == 1
    # Of a report of many lines, the first.
    last = next(line for line in reversed(finished.output.splitlines()) if "RunFailed: " in line)
    assert cause in last, finished.output[-2000:]
    return finished


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_full_or_read_only_disk_ends_a_run_with_its_cause_and_costs_no_complete_checkpoint(
    task: TaskPaths, disk: Path, tmp_path: Path, ray_dir: Path
) -> None:
    def overrides(every: int, steps: int = 1000) -> list[str]:
        return [
            *small(task, disk, ray_dir),
            f"hydra.run.dir={tmp_path}/hydra",
            f"trainer.save_freq={every}",
            f"trainer.total_training_steps={steps}",
            "trainer.max_actor_ckpt_to_keep=2",
            f"async_training.timeouts.stall={STALL_S}",
        ]

    with drilled(FULLY_ASYNC, overrides(every=1), disk) as run:
        run.wait_for_steps(3)
        with full(disk):
            ends_with(run, "No space left on device", deadline_s=0)
    saved = max(committed_steps(disk))
    assert saved >= 2

    with drilled(FULLY_ASYNC, overrides(every=1), disk) as run:
        run.wait_for_steps(2)
        with read_only(disk):
            ends_with(run, "Read-only file system", deadline_s=0)
    before, saved = saved, max(committed_steps(disk))
    assert saved > before

    with drilled(FULLY_ASYNC, overrides(every=1000), disk) as run:
        run.wait_for_steps(2)
        with full(disk):
            run.wait_for(lambda: "metrics.jsonl cannot be written, the run goes on" in run.said(), "a line lost")
            time.sleep(WITHOUT_DISK_S)
        run.wait_for_steps(2)
        with full(disk):
            run.signal("rollout server", STOP)
            ends_with(run, "nothing has begun or ended", STALL_S)
    assert max(committed_steps(disk)) == saved

    with drilled(FULLY_ASYNC, overrides(every=1, steps=saved + 2), disk) as run:
        finished = run.end_within(300)
    assert finished.returncode == 0
    check_books(finished, (saved + 2) * GROUPS)

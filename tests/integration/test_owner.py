# SPDX-License-Identifier: Apache-2.0
"""A run's folder has one owner; its lock ends with its process, whatever that has forked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_engine.record.owner import CHECKPOINTS, LOCK_FILE, RUN, FolderTaken, Owner, is_owned, owner_of
from recipe.async_engine.record.run_record import SUMMARY_FILE, RunRecord

FIRST = """
import os, sys, time
from recipe.async_engine.record.run_record import RunRecord
record = RunRecord(sys.argv[1], "fully_async")
record.step({"training/global_step": 1})
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A run in a process of its own, and the process that it has forked."""
    run = subprocess.Popen([sys.executable, "-c", FIRST, str(folder)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    return run, int(run.stdout.readline())


def test_second_start_in_a_folder_names_the_first_and_touches_nothing(tmp_path: Path) -> None:
    run, child = start(tmp_path)
    (tmp_path / SUMMARY_FILE).write_text("the first one's")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert is_owned(tmp_path) and not is_owned(tmp_path, CHECKPOINTS)
    assert owner_of(tmp_path) == socket.gethostname()
    try:
        with pytest.raises(FolderTaken, match=rf"process {run.pid} on \S+, since 20.*another folder"):
            RunRecord(tmp_path, "fully_async")
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    finally:
        run.kill()
        run.wait()
        os.kill(child, signal.SIGKILL)


def test_folder_is_free_once_its_owner_was_killed_although_a_fork_of_it_goes_on(tmp_path: Path) -> None:
    run, child = start(tmp_path)
    run.kill()
    run.wait()
    assert not is_owned(tmp_path)
    assert not is_owned(tmp_path / "nowhere") and owner_of(tmp_path / "nowhere") == ""
    try:
        os.kill(child, 0)
        RunRecord(tmp_path, "fully_async").close(None)
    finally:
        os.kill(child, signal.SIGKILL)


def test_folder_is_free_after_the_end_and_the_checkpoints_have_an_owner_of_their_own(tmp_path: Path) -> None:
    run, child = start(tmp_path)
    try:
        Owner(tmp_path, CHECKPOINTS).release()
        with pytest.raises(FolderTaken):
            Owner(tmp_path, RUN, wait_s=0.3)
        run.kill()
        Owner(tmp_path, RUN, wait_s=20).release()
    finally:
        run.wait()
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00\x01"])
def test_lock_file_of_any_content_is_no_obstacle(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    Owner(tmp_path, RUN).release()
    assert f"process {os.getpid()} on " in (tmp_path / LOCK_FILE).read_text()

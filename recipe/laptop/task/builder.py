# SPDX-License-Identifier: Apache-2.0
"""Creates the files of the built-in task on first use.

Contract: after ``ensure_task``, the task's directory is complete and has the requested settings. The files are written
to a temporary directory, which is then renamed, so a process that dies never leaves an incomplete task in the task's
directory. A lock file next to the directory keeps two processes from creating the same task at once. A directory that
contains anything other than a built-in task is never replaced.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipe.laptop.task import reward
from recipe.laptop.task.problems import Problem, make_splits
from recipe.laptop.task.settings import FORMAT_VERSION, TaskPaths, TaskSettings

logger = logging.getLogger(__name__)

MANIFEST = "task.json"
MODEL, TRAIN, VAL = "model", "train.parquet", "val.parquet"
DATA_SOURCE = "recipe/digits"
LOCK_TIMEOUT_SECONDS = 600.0


class TaskDirectoryError(RuntimeError):
    """The directory of a built-in task cannot be used; the message names it and says what to change."""


def ensure_task(
    out_dir: str | os.PathLike[str], settings: TaskSettings, lock_timeout: float = LOCK_TIMEOUT_SECONDS
) -> TaskPaths:
    """Create the built-in task with ``settings`` in ``out_dir``, unless it exists there already; return its paths.

    Args:
        out_dir: directory for this task alone. If it is incomplete or was made with other settings, it is made anew.
        lock_timeout: seconds to wait while another process creates a task in the same directory.

    Raises:
        TaskDirectoryError: ``out_dir`` contains something else, or another process did not finish in time.
    """
    import filelock

    out = Path(out_dir).expanduser().resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    lock_file = out.parent / f".{out.name}.lock"
    try:
        with filelock.FileLock(lock_file, timeout=lock_timeout):
            if not is_complete(out, settings):
                _remake(out, settings)
    except filelock.Timeout as error:
        raise TaskDirectoryError(
            f"another process has held {lock_file} for more than {lock_timeout:g} s; wait for it, end it, or set "
            "another directory for the task"
        ) from error
    return TaskPaths(out / MODEL, out / TRAIN, out / VAL, Path(reward.__file__).resolve())


def is_complete(out: Path, settings: TaskSettings) -> bool:
    """Return whether ``out`` has a complete task with these settings.

    It has one if its manifest has these settings and the present format version, and all files that the manifest lists
    exist.
    """
    try:
        manifest = json.loads((out / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return manifest == _manifest(out, settings)


def _remake(out: Path, settings: TaskSettings) -> None:
    _refuse_foreign(out)
    started = time.monotonic()
    making = out.parent / f".{out.name}.making"
    # If this folder exists, an earlier process has died. No other process is writing to it, because this one holds the
    # lock.
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    _write(making, settings)
    (making / MANIFEST).write_text(json.dumps(_manifest(making, settings), indent=2, sort_keys=True) + "\n")
    if out.exists():
        shutil.rmtree(out)
    os.replace(making, out)
    logger.info("made the built-in task in %s in %.1f s", out, time.monotonic() - started)


def _write(directory: Path, settings: TaskSettings) -> None:
    from recipe.laptop.task.tokenizer import build_tokenizer
    from recipe.laptop.task.warm_start import make_warm_model

    train, val = make_splits(settings)
    _write_parquet(train, "train", directory / TRAIN)
    _write_parquet(val, "val", directory / VAL)
    tokenizer = build_tokenizer()
    model = make_warm_model(settings, tokenizer, frozenset(problem.key for problem in val))
    model.save_pretrained(directory / MODEL)
    tokenizer.save_pretrained(directory / MODEL)


def _write_parquet(problems: list[Problem], split: str, path: Path) -> None:
    """Write problems as a data file for verl's ``RLHFDataset`` and reward loop. Equal problems give equal files."""
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "instruction_following",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": split, "operation": problem.operation},
        }
        for index, problem in enumerate(problems)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _refuse_foreign(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise TaskDirectoryError(f"{out} is a file; set another directory for the task")
    foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in (MANIFEST, MODEL, TRAIN, VAL))
    if foreign:
        raise TaskDirectoryError(
            f"{out} holds {foreign[0]!r}, which is no part of a built-in task, so it is not replaced; set another "
            "directory for the task, or empty this one"
        )


def _manifest(directory: Path, settings: TaskSettings) -> dict[str, Any]:
    files = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }
    return {"format": FORMAT_VERSION, "settings": asdict(settings), "files": files}

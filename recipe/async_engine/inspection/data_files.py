# SPDX-License-Identifier: Apache-2.0
"""What is found in the data files that a configuration names, read as verl's data set reads them.

Contract: a file is opened by the call that verl's `RLHFDataset` makes (the library `datasets`, by the ending of the
name), and all files of a setting are joined by the call that joins them there; so what is refused here would fail in
the run, and what the library reads is accepted. What it converts stays in its cache, where the run finds it. A file
that does not read costs its own fact, with the library's words. Neither verl nor torch is imported, and reading has a
deadline. A data set class of the user's reads in its own way: the run's own process asks it (`trainer.data_sets`).
Shown by tests/integration/test_data_check.py.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pebble import concurrent

from recipe.async_engine.config.facts import TRAIN_FILES, VAL_FILES, FileFact
from recipe.async_engine.config.problems import lookup
from recipe.async_engine.config.sections import Timeouts
from recipe.async_engine.inspection.prompt_check import row_faults

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
"""By the end of a file's name: the reader that verl asks `datasets` for (verl/utils/dataset/rl_dataset.py:197)."""
WORDS = 400
"""Characters of another library's message that are shown."""

NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0")
"""How the library says of a JSON or Parquet file that it has none."""


class Unreadable(Exception):
    """A file, or files together, that the library refuses; its words."""


def data_facts(config: Mapping[str, Any]) -> Iterator[FileFact]:
    """One fact for each file of the two settings, and one more where files cannot be joined."""
    for setting in (TRAIN_FILES, VAL_FILES):
        value = lookup(config, setting)
        paths = value if isinstance(value, list) else [value] if value else []
        if not paths:
            yield FileFact(setting, "null", "data", fault="is not set")
        tables: list[Dataset] = []
        for path in map(str, paths):
            fact, table = _file(setting, path, config)
            yield fact
            if table is not None:
                tables.append(table)
                if (fault := _cannot_join(tables)) is not None:
                    tables.pop()
                    yield FileFact(setting, path, "data", fault=fault)


def words_of(error: BaseException) -> str:
    """The type and the first words of an error: of its cause, where the library only wraps that."""
    cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
    said = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {said[:WORDS]}{'...' * (len(said) > WORDS)}" if said else type(cause).__name__


def _file(setting: str, path: str, config: Mapping[str, Any]) -> tuple[FileFact, Dataset | None]:
    if "://" in path or lookup(config, "data.custom_cls.path") is not None:
        # Read by the run's own process: verl copies what is elsewhere, and what a path is to a user's class, it knows.
        return FileFact(setting, path, "data"), None
    ending = next((ending for ending in READERS if path.endswith(ending)), None)
    if (fault := _not_there(path)) is not None or ending is None:
        return FileFact(setting, path, "data", fault=fault or f"is none of {', '.join(READERS)}"), None
    limit = lookup(config, "async_training.timeouts.startup")
    limit_s = float(limit) if isinstance(limit, int | float) else Timeouts().startup
    try:
        table = _within(limit_s, path, READERS[ending])
        faults = row_faults(table, config)
    except Unreadable as error:
        if any(words in str(error) for words in NO_ROWS):
            return FileFact(setting, path, "data", rows=0), None
        return FileFact(setting, path, "data", fault=f"is not a {ending[1:]} file that can be read ({error})"), None
    return FileFact(setting, path, "data", None, len(table), tuple(table.column_names), row_faults=faults), table


def _not_there(path: str) -> str | None:
    if path.startswith("~"):
        return "does not exist: ~ is taken as it is written; write the whole path"
    if "\0" in path:
        return "does not exist"
    if os.path.isdir(path):
        return "is no file"
    # The library takes patterns.
    return None if os.path.exists(path) or glob.glob(path, recursive=True) else "does not exist"


def _within(limit_s: float, path: str, reader: str) -> Dataset:
    """The file, read beside this thread: a disk or a lock that does not answer is left behind."""
    files = [Path(path)] if os.path.exists(path) else sorted(map(Path, glob.glob(path, recursive=True)))
    try:
        found = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    if not sum(size for _, _, size in found):
        raise Unreadable("it is empty")
    reading = concurrent.thread(name="data-files", daemon=True)(_read)(path, reader, found)
    try:
        return reading.result(limit_s)
    except TimeoutError:
        raise Unreadable(f"not within {limit_s:g} s, async_training.timeouts.startup") from None


@lru_cache(maxsize=32)
def _read(path: str, reader: str, found: tuple[Any, ...]) -> Dataset:
    """Once for each state of the files, which ``found`` names."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(reader, data_files=path)["train"]
    except Exception as error:  # the library lets through whatever its parsers raise
        raise Unreadable(words_of(error)) from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def _cannot_join(tables: list[Dataset]) -> str | None:
    """Why the last of these files cannot be joined with those before it."""
    from datasets import concatenate_datasets

    try:
        concatenate_datasets(tables)
    except Exception as error:  # as above
        return f"cannot be joined with the files before it ({words_of(error)})"
    return None

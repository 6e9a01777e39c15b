# SPDX-License-Identifier: Apache-2.0
"""Reads a configuration's data files in the same way as verl's `RLHFDataset`, and finds unusable rows.

Contract: files are opened and concatenated with the same calls of the library `datasets` as in verl. So a refused file
would also fail in the run, and a file that `datasets` can read is accepted. `datasets` keeps converted files in its
cache, where the run finds them. An unreadable file is reported with the error message of `datasets`, and reading has a
deadline. If the configuration names a data set class of the user's own (`data.custom_cls`), no files are read here; the
trainer's process checks the rows (`trainer.data_sets`).

`row_faults` uses vectorized Arrow functions, so that a million rows take seconds. A prompt is reported as too long only
if its text alone has more tokens than the limit. The chat template, which only transformers can apply, adds further
tokens. So every reported prompt is too long, and prompts that only the template makes too long are found by the run
itself. This module imports neither verl, torch nor transformers. Shown by tests/integration/test_data_check.py.
"""

from __future__ import annotations

import glob
import heapq
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.compute as compute
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from pebble import concurrent

from recipe.async_engine.config.facts import TRAIN_FILES, VAL_FILES, VERLS_LOOPS, VERLS_MANAGERS, FileFact, RowFault
from recipe.async_engine.config.plan import MODEL, teacher_keys
from recipe.async_engine.config.problems import lookup
from recipe.async_engine.config.sections import Timeouts

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
"""The loader of `datasets` that verl uses for each suffix of a file name (verl/utils/dataset/rl_dataset.py:197)."""
WORDS = 400
"""Number of characters to which the error message of another library is shortened."""

NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0")
"""Texts in the error messages of `datasets` for a JSON or Parquet file without rows."""


class Unreadable(Exception):
    """A data file cannot be read; the message says why."""


def data_facts(config: Mapping[str, Any]) -> Iterator[FileFact]:
    """Yield a fact for each data file, and a second one if the file cannot be concatenated with the files before it."""
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
    """Return type and shortened message of an error or, if it only wraps its cause, of the cause."""
    cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
    said = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {said[:WORDS]}{'...' * (len(said) > WORDS)}" if said else type(cause).__name__


def _file(setting: str, path: str, config: Mapping[str, Any]) -> tuple[FileFact, Dataset | None]:
    """Return a `FileFact` about a data file, and its table if the file can be read."""
    if "://" in path or lookup(config, "data.custom_cls.path") is not None:
        # Only the run reads such files: verl downloads remote ones, and a user's class may interpret paths differently.
        return FileFact(setting, path, "data"), None
    ending = next((ending for ending in READERS if path.endswith(ending)), None)
    if (fault := _not_there(path)) is not None or ending is None:
        return FileFact(setting, path, "data", fault=fault or f"is none of {', '.join(READERS)}"), None
    limit = lookup(config, "async_training.timeouts.startup")
    limit_s = float(limit) if isinstance(limit, int | float) else Timeouts().startup
    try:
        table = _within(limit_s, path, READERS[ending])
        faults = row_faults(table, config)
        if setting == TRAIN_FILES:
            faults += tuple(_without_teacher(table, config))
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
    # The path may be a pattern such as *.parquet, which `datasets` accepts.
    return None if os.path.exists(path) or glob.glob(path, recursive=True) else "does not exist"


def _within(limit_s: float, path: str, reader: str) -> Dataset:
    """Return the table of a file; raise Unreadable if it cannot be read within ``limit_s`` seconds.

    Another thread reads the file, and is abandoned if a disk or a lock blocks it for too long.
    """
    files = [Path(path)] if os.path.exists(path) else sorted(map(Path, glob.glob(path, recursive=True)))
    try:
        found = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    if not sum(size for _, _, size in found):
        raise Unreadable("the file is empty")
    reading = concurrent.thread(name="data-files", daemon=True)(_read)(path, reader, found)
    try:
        return reading.result(limit_s)
    except TimeoutError:
        raise Unreadable(f"reading took longer than async_training.timeouts.startup={limit_s:g} s") from None


@lru_cache(maxsize=32)
def _read(path: str, reader: str, found: tuple[Any, ...]) -> Dataset:
    """Return the table of the files, cached until ``found`` (their names, modification times and sizes) changes."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(reader, data_files=path)["train"]
    except Exception as error:  # `datasets` passes on whatever its parsers raise.
        raise Unreadable(words_of(error)) from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def _cannot_join(tables: list[Dataset]) -> str | None:
    """Return why the last of ``tables`` cannot be concatenated with the others; None if it can."""
    from datasets import concatenate_datasets

    try:
        concatenate_datasets(tables)
    except Exception as error:  # `datasets` passes on whatever its parsers raise.
        return f"cannot be joined with the files before it ({words_of(error)})"
    return None


COUNTED = 2000
"""At most this many prompts of a file, those with the most bytes, are tokenized to find the ones that are too long."""
ANSWER = "ground_truth"


def row_faults(table: Dataset, config: Mapping[str, Any]) -> tuple[RowFault, ...]:
    """Return the faults of a file's rows; each `RowFault` covers all rows with the same fault."""
    key = str(lookup(config, "data.prompt_key", "prompt"))
    columns = {name: table.data.table.column(name) for name in table.column_names}
    found: list[RowFault] = []
    if key in columns:
        found += _prompts(columns[key], key, config, _loops_of_verls_own(config, columns))
    for name, needed in (("reward_model", _is_registered(config)), ("extra_info", False)):
        if name in columns:
            found += _mappings(name, columns[name], needed)
    answers = columns.get("reward_model")
    if answers is not None and _lack_answers(answers, config):
        found.append(RowFault(f"reward_model.{ANSWER}", "missing", 0, len(answers)))
    return tuple(found)


def _is_registered(config: Mapping[str, Any]) -> bool:
    """Return whether the reward manager comes from verl's registry. Such managers need the column `reward_model`."""
    return bool(lookup(config, "reward.reward_manager.source", "register") == "register")


def _lack_answers(column: pyarrow.ChunkedArray, config: Mapping[str, Any]) -> bool:
    """Return whether the reward manager is verl's own and reads the ground truth, but ``column`` does not have it."""
    manager = lookup(config, "reward.reward_manager.name", VERLS_MANAGERS[0])
    taken = _is_registered(config) and manager in VERLS_MANAGERS
    return bool(
        taken and len(column) and pyarrow.types.is_struct(column.type) and column.type.get_field_index(ANSWER) < 0
    )


def _loops_of_verls_own(config: Mapping[str, Any], columns: Mapping[str, Any]) -> bool:
    """Return whether every prompt goes to one of verl's own agent loops, which accept only lists of messages."""
    agent = "actor_rollout_ref.rollout.agent"
    if lookup(config, f"{agent}.agent_loop_config_path") or "agent_name" in columns:
        return False
    return lookup(config, f"{agent}.default_agent_loop", VERLS_LOOPS[0]) in VERLS_LOOPS


def _mappings(name: str, column: pyarrow.ChunkedArray, needed: bool) -> Iterator[RowFault]:
    """Yield a fault if the values of a column are not mappings and, with ``needed``, another if values are missing."""
    nulls = column.null_count
    if needed and nulls:
        yield RowFault(name, "missing", compute.index(compute.is_null(column), True).as_py(), nulls)
    kind = column.type
    if not (
        # `datasets` stores a column of mixed types as JSON, in an extension type; its values may be mappings.
        isinstance(kind, pyarrow.BaseExtensionType)
        or pyarrow.types.is_struct(kind)
        or pyarrow.types.is_map(kind)
        or pyarrow.types.is_null(kind)
    ):
        yield RowFault(name, "no mapping", compute.index(compute.is_valid(column), True).as_py(), len(column) - nulls)


def _without_teacher(table: Dataset, config: Mapping[str, Any]) -> Iterator[RowFault]:
    """Yield a fault if some rows have a value by which verl finds none of several teachers."""
    keys, name = teacher_keys(config), str(lookup(config, "distillation.teacher_key"))
    if not keys or name not in table.column_names:
        return
    column = table.data.table.column(name)
    if wrong := [value for value in compute.unique(column).to_pylist() if value not in keys]:
        found = compute.is_in(column, value_set=pyarrow.array(wrong, column.type))
        first = compute.index(found, True).as_py()
        count = compute.sum(found).as_py()
        yield RowFault(name, "no teacher", first, count, value=str(column[first].as_py()))


def _prompts(
    column: pyarrow.ChunkedArray, key: str, config: Mapping[str, Any], as_messages: bool
) -> Iterator[RowFault]:
    """Yield faults for prompts that are empty or too long, or that are plain text although ``as_messages`` is True."""
    lengths: list[np.ndarray] = []
    texts: list[tuple[int, int, list[str]]] = []
    limit = _limit(config)
    first = 0
    if pyarrow.types.is_null(column.type) and len(column):
        yield RowFault(key, "empty", 0, len(column))
        return
    if as_messages and (_is_text(column.type) or pyarrow.types.is_string_view(column.type)):
        yield RowFault(key, "text", 0, len(column))
        return
    for chunk in column.chunks:
        contents, owners = _contents(chunk)
        if contents is None:
            return
        sizes = np.bincount(owners, compute.binary_length(contents).to_numpy(False), len(chunk)).astype(np.int64)
        stripped = compute.binary_length(compute.utf8_trim_whitespace(contents)).to_numpy(False)
        lengths.append(np.bincount(owners, stripped, len(chunk)))
        if limit is not None:
            long = np.flatnonzero(sizes > limit)
            for row in long[np.argsort(sizes[long])[-COUNTED:]]:
                parts = contents.filter(pyarrow.array(owners == row)).to_pylist()
                texts.append((int(sizes[row]), first + int(row), parts))
            texts = heapq.nlargest(COUNTED, texts)
        first += len(chunk)
    empty = np.flatnonzero(np.concatenate(lengths) == 0) if lengths else np.empty(0)
    if len(empty):
        yield RowFault(key, "empty", int(empty[0]), len(empty))
    if texts and limit is not None:
        yield from _too_long(texts, key, limit, config)


def _is_text(kind: pyarrow.DataType) -> bool:
    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _limit(config: Mapping[str, Any]) -> int | None:
    """Return the largest allowed number of tokens of a prompt; None if not set, or if verl drops longer prompts."""
    limit = lookup(config, "data.max_prompt_length")
    if lookup(config, "data.filter_overlong_prompts") or isinstance(limit, bool) or not isinstance(limit, int):
        return None
    return limit


def _contents(column: pyarrow.Array) -> tuple[pyarrow.Array | None, np.ndarray]:
    """Return the texts of all messages, and each text's row. The texts are None if some content is not text."""
    if _is_text(column.type):
        return column.fill_null(""), np.arange(len(column))
    if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
        return None, np.empty(0)
    messages = column.flatten()
    if not pyarrow.types.is_struct(messages.type) or messages.type.get_field_index("content") < 0:
        return None, np.empty(0)
    contents = compute.struct_field(messages, "content")
    if not _is_text(contents.type):
        return None, np.empty(0)
    return contents.fill_null(""), compute.list_parent_indices(column).to_numpy(False)


def _too_long(
    texts: Sequence[tuple[int, int, list[str]]], key: str, limit: int, config: Mapping[str, Any]
) -> Iterator[RowFault]:
    """Yield a fault if some prompts have more than ``limit`` tokens.

    ``texts`` has a tuple for each prompt of more than ``limit`` bytes: its number of bytes, its row, and the texts of
    its messages.
    """
    tokenizer = _tokenizer(str(lookup(config, f"{MODEL}.tokenizer_path") or lookup(config, f"{MODEL}.path")))
    if tokenizer is None:
        return
    counts = {
        row: sum(len(encoding.ids) for encoding in tokenizer.encode_batch(parts, add_special_tokens=False))
        for _, row, parts in texts
    }
    long = {row: count for row, count in counts.items() if count > limit}
    if long:
        yield RowFault(key, "too long", min(long), len(long), most=max(long.values()))


def is_hub_name(path: str) -> bool:
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def other_tokens(config: Mapping[str, Any], teacher: str) -> str | None:
    """Return why a teacher cannot judge the policy's tokens, if an id stands for different tokens; otherwise None.

    Added tokens do not count, because models with the same vocabulary name special tokens differently.
    """
    named = lookup(config, f"{MODEL}.tokenizer_path") or lookup(config, f"{MODEL}.path")
    ours, theirs = _tokenizer(str(named)), _tokenizer(teacher)
    if ours is None or theirs is None:
        return None
    others = {number: token for token, number in theirs.get_vocab(False).items()}
    different = [(n, token) for token, n in ours.get_vocab(False).items() if others.get(n, token) != token]
    if not different:
        return None
    number, token = min(different)
    known = f"token {number} is {token!r} for {named} and {others[number]!r} for this teacher"
    return f"has another vocabulary than the policy: {known}"


def _tokenizer(model: str) -> Any:
    """Return the model's tokenizer; None if it has no tokenizer.json, the only format that can be loaded quickly."""
    from tokenizers import Tokenizer

    local = Path(model) / "tokenizer.json"
    path = str(local) if os.path.isfile(local) else None
    if path is None and not os.path.exists(model) and is_hub_name(model):
        found = try_to_load_from_cache(model, "tokenizer.json")
        path = found if isinstance(found, str) else None
    if path is None:
        return None
    try:
        json.loads(Path(path).read_bytes())
        return Tokenizer.from_file(path)
    except Exception as error:  # The library raises plain `Exception` objects.
        logger.warning("lengths and vocabularies are not checked: %s cannot be read (%s)", path, error)
        return None

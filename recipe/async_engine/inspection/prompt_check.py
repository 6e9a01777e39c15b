# SPDX-License-Identifier: Apache-2.0
"""Finds the rows of a data file that cannot be used, before a process starts.

Contract: `row_faults` looks at the columns that verl takes apart, by Arrow's own loops: a million rows take seconds. It
imports neither transformers nor verl. A prompt counts as too long if its text alone has more tokens than allowed: the
chat template, which only transformers knows how to fill, can only add to that. So what is reported is certain, and a
prompt that is longer by its template alone is found by the run. Shown by tests/integration/test_data_check.py.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.compute as compute
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from recipe.async_engine.config.facts import VERLS_LOOPS, VERLS_MANAGERS, RowFault
from recipe.async_engine.config.plan import MODEL
from recipe.async_engine.config.problems import lookup

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

# Of the prompts that may be too long, so many are counted in tokens, the longest ones.
COUNTED = 2000
ANSWER = "ground_truth"


def row_faults(table: Dataset, config: Mapping[str, Any]) -> tuple[RowFault, ...]:
    """The faults of a file's rows, each with its first row (from 0) and how many rows have it."""
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
    """Whether the reward manager is one of those that take `reward_model` apart."""
    return bool(lookup(config, "reward.reward_manager.source", "register") == "register")


def _lack_answers(column: pyarrow.ChunkedArray, config: Mapping[str, Any]) -> bool:
    """Whether no row has what a reward manager of verl's takes, for a reward function of the user's too."""
    manager = lookup(config, "reward.reward_manager.name", VERLS_MANAGERS[0])
    taken = _is_registered(config) and manager in VERLS_MANAGERS
    return bool(
        taken and len(column) and pyarrow.types.is_struct(column.type) and column.type.get_field_index(ANSWER) < 0
    )


def _loops_of_verls_own(config: Mapping[str, Any], columns: Mapping[str, Any]) -> bool:
    """Whether each prompt goes to an agent loop of verl's own, which take messages alone."""
    agent = "actor_rollout_ref.rollout.agent"
    if lookup(config, f"{agent}.agent_loop_config_path") or "agent_name" in columns:
        return False
    return lookup(config, f"{agent}.default_agent_loop", VERLS_LOOPS[0]) in VERLS_LOOPS


def _mappings(name: str, column: pyarrow.ChunkedArray, needed: bool) -> Iterator[RowFault]:
    """A column that verl takes apart by its keys, or with ``needed`` in each row."""
    nulls = column.null_count
    if needed and nulls:
        yield RowFault(name, "missing", compute.index(compute.is_null(column), True).as_py(), nulls)
    kind = column.type
    if not (
        pyarrow.types.is_struct(kind) or pyarrow.types.is_map(kind) or pyarrow.types.is_null(kind) or _is_json(kind)
    ):
        yield RowFault(name, "no mapping", compute.index(compute.is_valid(column), True).as_py(), len(column) - nulls)


def _is_json(kind: pyarrow.DataType) -> bool:
    """Whether values are of several types, which `datasets` keeps as JSON."""
    return isinstance(kind, pyarrow.BaseExtensionType)


def _prompts(
    column: pyarrow.ChunkedArray, key: str, config: Mapping[str, Any], as_messages: bool
) -> Iterator[RowFault]:
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
    """Tokens that a prompt may have; None where longer ones are left out by verl."""
    limit = lookup(config, "data.max_prompt_length")
    if lookup(config, "data.filter_overlong_prompts") or isinstance(limit, bool) or not isinstance(limit, int):
        return None
    return limit


def _contents(column: pyarrow.Array) -> tuple[pyarrow.Array | None, np.ndarray]:
    """The texts of all messages, and the row of each; None where the column holds something else than text."""
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
    """Whether this could be the name of a model on the hub."""
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def _tokenizer(model: str) -> Any:
    """The model's tokenizer, None where it has none in the form that is quick to load."""
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
    except Exception as error:  # the library raises plain Exception
        logger.warning("the lengths of the prompts are not checked: %s cannot be read (%s)", path, error)
        return None

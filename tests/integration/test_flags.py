# SPDX-License-Identifier: Apache-2.0
"""What a flag composes for stock verl's main, and what it leaves alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from hydra_plugins.recipe_searchpath import verl_config_folder
from recipe.async_engine.flags.before_run import BeforeRun
from recipe.async_engine.flags.register import VARIABLE
from recipe.async_engine.inspection.check import plain
from recipe.async_engine.settings.problems import ConfigError
from recipe.async_engine.settings.v1_validation import read_v1
from recipe.async_engine.settings.validation import validate

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from published import GRPO_GEO3K_IMAGES, GRPO_GSM8K

MODES = ("fully_async", "one_step_off", "partial_rollout")


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def composed(*overrides: str) -> Any:
    with initialize_config_dir(verl_config_folder(), version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


@pytest.mark.parametrize("mode", MODES)
def test_the_arguments_of_a_script_are_kept_beside_a_flag(mode: str) -> None:
    stock, flagged = composed(*GRPO_GSM8K), composed(*GRPO_GSM8K, f"+recipe={mode}")
    for argument in GRPO_GSM8K:
        setting = argument.split("=")[0]
        assert OmegaConf.select(flagged, setting) == OmegaConf.select(stock, setting), setting
    assert flagged.trainer.v1.trainer_mode == f"recipe_{mode}"
    assert flagged.ray_kwargs.ray_init.runtime_env.env_vars[VARIABLE] == "1"
    assert "recipe" not in json.dumps(OmegaConf.to_container(stock))


@pytest.mark.parametrize(
    ("ended", "says", "began", "status"),
    [("with_alarms", True, 1, 3), ("with_alarms", False, 1, 0), ("with_alarms", True, -1, 0), ("well", True, 1, 0)],
)
def test_a_main_with_a_flag_exits_as_the_run_ended_unless_the_summary_is_of_another(
    tmp_path: Path, ended: str, says: bool, began: float, status: int
) -> None:
    folder = f"trainer.default_local_dir={tmp_path}"
    config = composed(*GRPO_GSM8K, "+recipe=fully_async", folder, f"async_training.alarms.exit_status={says}")
    callback, done = BeforeRun(), JobReturn(status=JobStatus.COMPLETED)
    callback.on_run_start(composed(*GRPO_GSM8K))  # another main: nothing but the time is noted
    callback.on_run_end(config, job_return=done)
    (tmp_path / "summary.json").write_text(json.dumps({"ended": ended, "began": time.time() + began}))
    with pytest.raises(SystemExit, match=str(status)) if status else nullcontext():
        callback.on_run_end(config, job_return=done)
    callback.on_run_end(config, job_return=JobReturn(status=JobStatus.FAILED))
    callback.on_run_end(composed(*GRPO_GSM8K, folder), job_return=done)


@pytest.mark.parametrize("mode", MODES)
def test_a_script_for_images_composes_and_validates_in_each_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.async_engine.flags import trainer as flagged

    problems = []

    def judge(config: Any, available: Any) -> None:
        problems.extend(validate(plain(config), dataset_rows=2101))

    monkeypatch.setattr(flagged, "check", judge)
    nccl = "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
    (trainer,) = [trainer for trainer in flagged.TRAINERS if trainer.mode == mode]
    config = trainer(composed(*GRPO_GEO3K_IMAGES, f"+recipe={mode}", nccl)).config
    assert problems == []
    assert config.data.image_key == "images"
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache


def test_a_wrong_flag_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(MissingConfigException, match="recipe/fuly_async") as refused:
        composed("+recipe=fuly_async")
    assert all(mode in str(refused.value) for mode in MODES)


def test_log_prob_servers_join_a_flag_or_have_their_own() -> None:
    assert composed("+recipe=one_step_off", "model_engine_server=fsdp2").model_engine_server.backend == "fsdp2"
    flagged = composed(*GRPO_GSM8K, "+recipe=model_engine_server")
    assert (flagged.trainer.v1.trainer_mode, flagged.model_engine_server.backend) == ("recipe_fully_async", "fsdp2")
    assert flagged.data.train_batch_size == 1024
    megatron = composed("+recipe=model_engine_server", "model_engine_server=megatron")
    assert megatron.model_engine_server.backend == "megatron"


@pytest.mark.parametrize("trainer", ["separate_async", "colocate_async"])
def test_a_flag_puts_our_parts_beside_a_trainer_of_verls(trainer: str) -> None:
    flagged = composed(*GRPO_GSM8K, f"+recipe={trainer}")
    assert flagged.trainer.v1.trainer_mode == f"recipe_{trainer}"
    assert flagged.trainer.v1.sampler.custom_sampler.name == "BoundedReplayBuffer"
    assert not read_v1(plain(flagged)).servers.enabled
    assert flagged.trainer.v1[trainer] == composed().trainer.v1[trainer]


def test_log_prob_servers_beside_verls_trainer_are_refused_where_nothing_would_ask_or_reach_them() -> None:
    servers = (
        "+recipe=separate_async",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "algorithm.adv_estimator=grpo",
        "model_engine_server=fsdp2",
        "model_engine_server.n_gpus_per_node=2",
    )
    nccl = "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
    assert read_v1(plain(composed(*servers, nccl))).servers.ranks == 2
    with pytest.raises(ConfigError) as refused:
        read_v1(
            plain(
                composed(
                    *servers,
                    "model_engine_server.reference_replicas=1",
                    "actor_rollout_ref.actor.use_kl_loss=true",
                    "actor_rollout_ref.rollout.agent.agent_loop_manager_class=mine.Manager",
                    "algorithm.rollout_correction.bypass_mode=true",
                    "+async_training.proximal_log_probs=bypass",
                )
            )
        )
    assert [problem.setting for problem in refused.value.problems] == [
        "async_training.proximal_log_probs",
        "model_engine_server.reference_replicas",
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    ]

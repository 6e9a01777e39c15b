# SPDX-License-Identifier: Apache-2.0
"""What a flag composes for stock verl's main, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
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
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from hydra_plugins.recipe_searchpath import verl_config_folder
from recipe.async_engine.config.plan import derive
from recipe.async_engine.config.problems import ConfigError
from recipe.async_engine.config.sections import read_settings
from recipe.async_engine.config.v1_validation import read_v1
from recipe.async_engine.config.validation import judge
from recipe.async_engine.inspection.check import plain
from recipe.mains.arguments import CHOSEN, MAIN, check_main, settle, take_arguments
from recipe.mains.before_run import BeforeRun
from recipe.mains.register import VARIABLE

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from published import GRPO_GEO3K_IMAGES, GRPO_GSM8K

MODES = ("fully_async", "one_step_off", "partial_rollout")
TRAINERS = ("sync", "separate_async", "colocate_async")
FLAGS = (*MODES, "model_engine_server", "separate_async", "colocate_async")
# A main of Hydra's with a flag's callback, which does not judge the rest of the configuration here.
USERS_MAIN = """
import types
import hydra
from recipe.mains import plan_only
plan_only.findings = lambda config, trainer: print("judged", trainer) or types.SimpleNamespace(problems=[])

@hydra.main(config_path={folder!r}, config_name="ppo_trainer", version_base=None)
def main(config):
    print("task", config.trainer.use_v1, config.trainer.v1.trainer_mode)

main()
"""


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
    from recipe.mains import trainer as flagged

    problems = []

    def checked(config: Any, available: Any, judges: Any) -> None:
        problems.extend(judge(plain(config), dataset_rows=2101)[0])

    monkeypatch.setattr(flagged, "check", checked)
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


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("said", [f"trainer.v1.trainer_mode={mode}" for mode in TRAINERS])
def test_the_mode_that_a_flag_names_runs_whatever_else_the_script_says(flag: str, said: str) -> None:
    config = composed(f"+recipe={flag}", said, "trainer.use_v1=false")
    usual = composed(f"+recipe={flag}")
    assert settle(usual) == []
    nothing = f"has no effect: +recipe has chosen {usual[CHOSEN]}"
    assert settle(config) == [f"{said} {nothing}", f"trainer.use_v1=false {nothing}"]
    assert config == usual
    assert (config.trainer.use_v1, config.trainer.v1.trainer_mode) == (True, config[CHOSEN])


def test_a_flag_beside_another_mode_is_refused_and_no_flag_changes_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer_mode=recipe_one_step_off: allowed is recipe_fully_async\. \+recipe chose that"
    ):
        settle(composed("+recipe=fully_async", "trainer.v1.trainer_mode=recipe_one_step_off"))
    stock = composed("trainer.use_v1=false")
    assert settle(stock) == []
    assert stock == composed("trainer.use_v1=false")


@pytest.mark.parametrize(
    "flags", [["+recipe=fully_async", "+recipe=one_step_off"], ["+recipe=[fully_async,one_step_off]"]]
)
def test_two_flags_do_not_compose(flags: list[str]) -> None:
    with pytest.raises(ConfigCompositionException, match=r"recipe|async_engine"):
        composed(*flags)


@pytest.mark.parametrize(
    "main",
    [
        "verl.experimental.fully_async_policy.fully_async_main",
        "verl.experimental.one_step_off_policy.main_ppo",
        "verl.trainer.main_ppo_v0",
        "verl.trainer.main_generation_server",
        "recipe.fully_async.main",
    ],
)
def test_a_flag_is_refused_in_a_main_that_would_not_look_at_it(main: str) -> None:
    flagged = composed("+recipe=fully_async")
    with pytest.raises(ConfigError, match=rf"{re.escape(main)} would ignore it"):
        check_main(flagged, main)
    check_main(composed(), main)
    for other in (MAIN, "", "__main__", "my.own.main"):
        check_main(flagged, other)


def test_agent_loops_of_a_flag_name_the_cause_where_verls_own_trainer_asks_for_them() -> None:
    from recipe.mains.trainer import NoAgentLoops

    NoAgentLoops.create(config=None, llm_client=None)
    with pytest.raises(ConfigError, match="use_v1=true"):
        NoAgentLoops.create(config=None, llm_client=object())


def run_users_main(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "mine.py"
    script.write_text(USERS_MAIN.format(folder=verl_config_folder()))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_what_a_flag_settles_reaches_the_mains_task(tmp_path: Path) -> None:
    finished = run_users_main(tmp_path, "+recipe=one_step_off", "trainer.use_v1=false", "trainer.v1.trainer_mode=sync")
    assert finished.stdout.split("\n")[:2] == ["judged recipe_one_step_off", "task True recipe_one_step_off"]
    assert "trainer.use_v1=false has no effect" in finished.stderr


def test_of_several_runs_each_is_judged_and_a_mode_that_would_be_off_is_refused(tmp_path: Path) -> None:
    finished = run_users_main(tmp_path, "+recipe=one_step_off", "trainer.use_v1=true,false", "-m")
    assert "task True recipe_one_step_off" in finished.stdout
    assert "task False" not in finished.stdout
    assert finished.returncode == 1
    assert "In a multirun, +recipe cannot override trainer.use_v1" in finished.stderr


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], (1, 8)),
        (["rollout.nnodes=2", "rollout.n_gpus_per_node=4"], (2, 4)),
        ([f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=4"], (2, 4)),
        # verl takes the trainer's, where a script leaves it out.
        ([f"{ROLLOUT}.nnodes=2", "trainer.n_gpus_per_node=2"], (2, 2)),
        ([f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=4", "rollout.nnodes=2"], (2, 4)),
    ],
)
def test_generation_has_the_accelerators_that_a_script_of_either_kind_gives_it(
    mode: str, given: list[str], expected: tuple[int, int]
) -> None:
    config = composed(*GRPO_GSM8K, f"+recipe={mode}", *given)
    take_arguments(config, mode)
    assert (config.rollout.nnodes, config.rollout.n_gpus_per_node) == expected
    assert read_settings(plain(config))[1] == []


def test_accelerators_that_both_kinds_of_settings_name_differently_are_refused() -> None:
    config = composed(*GRPO_GSM8K, "+recipe=fully_async", f"{ROLLOUT}.nnodes=2", "rollout.nnodes=1")
    with pytest.raises(
        ConfigError,
        match=r"rollout\.nnodes=1: allowed is 2\. actor_rollout_ref\.rollout\.nnodes=2 has the same",
    ):
        take_arguments(config, "fully_async")


@pytest.mark.parametrize(("mode", "share"), [("fully_async", 0.85), ("partial_rollout", 0.4)])
def test_replicas_with_accelerators_of_their_own_have_their_own_share_of_memory(mode: str, share: float) -> None:
    from recipe.async_engine.trainer.verl_settings import derive_verl_settings

    shares = ("gpu_memory_utilization=0.4", "standalone_gpu_memory_utilization=0.85")
    config = composed(*GRPO_GSM8K, f"+recipe={mode}", *(f"{ROLLOUT}.{given}" for given in shares))
    take_arguments(config, mode)
    derive_verl_settings(config, derive(plain(config), dataset_rows=4096))
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == share

# SPDX-License-Identifier: Apache-2.0
"""The Hydra configurations compose from any directory, with the right precedence, and verl accepts what they say."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from recipe.async_engine.config.facts import Resources
from recipe.async_engine.config.fields import read_section
from recipe.async_engine.config.legacy import of_stock
from recipe.async_engine.config.plan import derive
from recipe.async_engine.config.sections import AsyncTraining, BuiltinTask, RolloutResources
from recipe.async_engine.config.validation import judge
from recipe.async_engine.inspection.check import plain
from recipe.async_engine.trainer.verl_settings import derive_verl_settings

CHECKOUT = Path(__file__).resolve().parents[2]
FSDP = "fully_async_ppo_trainer"
MEGATRON = "fully_async_ppo_megatron_trainer"
ONE_STEP_FSDP = "one_step_off_ppo_trainer"
ONE_STEP_MEGATRON = "one_step_off_ppo_megatron_trainer"

# The shape of a script for stock verl's fully-async main, as its users have them.
STOCK_SCRIPT = [
    "data.train_files=/data/train.parquet",
    "data.val_files=/data/test.parquet",
    "data.prompt_key=prompt",
    "data.truncation=left",
    "data.max_prompt_length=1024",
    "data.max_response_length=2048",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    "data.return_raw_chat=True",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "algorithm.kl_ctrl.kl_coef=0.0",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.model.path=/models/qwen",
    "+actor_rollout_ref.model.override_config.max_position_embeddings=32768",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "reward_model.reward_manager=dapo",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
    "trainer.logger=['console','tensorboard']",
    "trainer.save_freq=-1",
    "trainer.resume_mode=auto",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=4",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=4",
    "rollout.total_rollout_steps=51200",
    "async_training.staleness_threshold=0.1",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=4",
    "async_training.partial_rollout=True",
]
STOCK_FSDP = [*STOCK_SCRIPT, "actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2"]
STOCK_MEGATRON = [
    *STOCK_SCRIPT,
    "actor_rollout_ref.actor.strategy=megatron",
    "critic.strategy=megatron",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.ref.megatron.param_offload=True",
]
# What a script for stock verl's one-step-off main has in the place of the fully-asynchronous settings.
OTHERWISE = ("async_training.", "rollout.total_rollout_steps", "data.train_batch_size", "data.gen_batch_size")
ONE_STEP = ["data.train_batch_size=64", "trainer.total_epochs=2"]


def one_step(script: list[str]) -> list[str]:
    return [setting for setting in script if not setting.startswith(OTHERWISE)] + ONE_STEP


@pytest.fixture(autouse=True)
def anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs each test in an empty directory, with Hydra's global state clean before and after."""
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def composed(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """A primary configuration of the mode with overrides, as its main composes it."""
    mode = "one_step_off" if name.startswith("one_step_off") else "fully_async"
    with initialize_config_module(f"recipe.{mode}.config", version_base=None):
        return compose(name, overrides=list(overrides))


def run_main(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The mode's main in a process of its own, in the current directory."""
    command = [sys.executable, "-m", "recipe.fully_async.main", *arguments]
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.parametrize(("name", "script"), [(FSDP, STOCK_FSDP), (MEGATRON, STOCK_MEGATRON)])
def test_a_script_for_stock_verl_composes_validates_and_has_a_plan(name: str, script: list[str]) -> None:
    config = plain(composed(name, script))
    assert judge(config, dataset_rows=17000, available=Resources(accelerators=8))[0] == []
    plan = derive(config, dataset_rows=17000)
    assert (plan.batch_groups, plan.batches_per_version, plan.answers_per_group) == (64, 4, 16)
    assert (plan.trainer_ranks, plan.rollout_replicas, plan.max_staleness) == (4, 2, 4)
    # What is generated ahead is the script's; the bound lets long answers pass, as stock does without one.
    assert plan.pipeline_depth == 0.1
    assert plan.total_steps == 51200 // 64


@pytest.mark.parametrize(
    ("name", "script"), [(ONE_STEP_FSDP, one_step(STOCK_FSDP)), (ONE_STEP_MEGATRON, one_step(STOCK_MEGATRON))]
)
def test_a_script_for_stock_one_step_off_composes_validates_and_has_a_plan(name: str, script: list[str]) -> None:
    config = plain(composed(name, script))
    assert judge(config, dataset_rows=17000, available=Resources(accelerators=8))[0] == []
    plan = derive(config, dataset_rows=17000)
    assert (plan.batch_groups, plan.batches_per_version, plan.answers_per_group) == (64, 1, 16)
    assert (plan.trainer_ranks, plan.rollout_replicas, plan.max_staleness) == (4, 2, 1)
    # Whole batches of each epoch, as verl's data loader makes them.
    assert plan.total_steps == 2 * (17000 // 64)


def test_one_step_off_without_a_bound_is_synchronous_training() -> None:
    plan = derive(plain(composed(ONE_STEP_FSDP, ["preset=tiny_cpu", "async_training.staleness_threshold=0"])))
    assert (plan.max_staleness, plan.pipeline_depth, plan.batch_groups) == (0, 0, 16)


@pytest.mark.parametrize("name", [FSDP, MEGATRON])
def test_the_defaults_agree_with_stock(name: str) -> None:
    spec = find_spec("verl.experimental.fully_async_policy")
    assert spec is not None and spec.origin is not None
    with initialize_config_dir(str(Path(spec.origin).parent / "config"), version_base=None):
        stock = compose(FSDP)
    ours = composed(name)
    for section in ("async_training", "rollout"):
        differing = {key for key in stock[section] if ours[section][key] != stock[section][key]}
        assert differing == ({"n"} if section == "rollout" else set())
    for setting in ("actor.use_rollout_log_probs", "rollout.checkpoint_engine.backend", "model.use_remove_padding"):
        assert OmegaConf.select(ours.actor_rollout_ref, setting) == OmegaConf.select(stock.actor_rollout_ref, setting)
    assert ours.algorithm.rollout_correction == stock.algorithm.rollout_correction


@pytest.mark.parametrize("overrides", [[], ["preset=tiny_cpu"]])
def test_the_yaml_files_and_the_types_have_the_same_settings_and_defaults(overrides: list[str]) -> None:
    config = of_stock(plain(composed(FSDP, overrides)))
    assert config["async_training"]["weights"].pop("at_swap") == "interrupt", "by stock's partial_rollout"
    training, problems = read_section(AsyncTraining, config["async_training"], "async_training")
    assert problems == []
    assert set(config["async_training"]) == set(AsyncTraining.__dataclass_fields__)
    assert set(config["rollout"]) == set(RolloutResources.__dataclass_fields__)
    if overrides:
        task, problems = read_section(BuiltinTask, config["builtin_task"], "builtin_task")
        assert (task, problems) == (BuiltinTask(), [])
        assert set(config["builtin_task"]) == set(BuiltinTask.__dataclass_fields__)
    else:
        assert training == AsyncTraining()


@pytest.mark.parametrize("name", [FSDP, ONE_STEP_FSDP])
@pytest.mark.parametrize("preset", ["tiny_cpu", "tiny_cpu_long_tail"])
def test_the_presets_validate_and_have_a_plan(name: str, preset: str) -> None:
    config = plain(composed(name, [f"preset={preset}"]))
    logical = Resources(accelerators=config["ray_kwargs"]["ray_init"]["num_gpus"])
    assert judge(config, available=logical)[0] == []
    plan = derive(config)
    assert (plan.batch_groups, plan.answers_per_group, plan.trainer_ranks, plan.rollout_replicas) == (16, 8, 1, 1)
    assert config["rollout"]["n"] == 8
    assert config["builtin_task"]["lengths"] == ("long_tail" if preset == "tiny_cpu_long_tail" else "uniform")


def test_the_command_line_wins_over_the_preset_and_the_preset_over_the_defaults() -> None:
    config = composed(FSDP, ["preset=tiny_cpu", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=3"])
    assert config.trainer.total_training_steps == 3
    assert (config.actor_rollout_ref.rollout.n, config.rollout.n) == (4, 4)
    assert config.async_training.trigger_parameter_sync_step == 1
    assert config.async_training.max_group_retries == 2
    assert composed(FSDP).async_training.trigger_parameter_sync_step == 4


def test_two_ranks_and_two_replicas_need_only_their_numbers() -> None:
    numbers = ["trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=4"]
    config = plain(composed(FSDP, ["preset=tiny_cpu", *numbers]))
    assert judge(config, available=Resources(accelerators=4))[0] == []
    assert (derive(config).trainer_ranks, derive(config).rollout_replicas) == (2, 2)


ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
VERLS_OWN = f"{ENGINE}.custom_backend_module=null"
NCCL, GLOO = f"{ENGINE}.engine_kwargs.nccl", ["preset=tiny_cpu"]
INLINE, SLOW = "async_training.weights.publish=inline", "async_training.timeouts.weight_sync=1200"


@pytest.mark.parametrize(
    ("overrides", "made_with"),
    [
        ([], {"nccl": {"multi_sender": False, "timeout_s": 600.0}}),
        ([SLOW], {"nccl": {"multi_sender": False, "timeout_s": 1200}}),
        ([INLINE], {"nccl": {"timeout_s": 600.0}}),
        ([INLINE, f"+{NCCL}.multi_sender=true"], {"nccl": {"timeout_s": 600.0, "multi_sender": True}}),
        ([SLOW, f"+{NCCL}.timeout_s=60"], {"nccl": {"multi_sender": False, "timeout_s": 60}}),
        ([VERLS_OWN], {"nccl": {"multi_sender": False}}),
        ([VERLS_OWN, INLINE], {}),
        ([*GLOO, SLOW], {"recipe_gloo": {"timeout_s": 1200}}),
        # The ranks hand their weights to the engines beside them: the preset's engine is not used.
        ([*GLOO, "async_training.placement=shared", "actor_rollout_ref.hybrid_engine=true"], {}),
    ],
)
def test_every_member_of_a_sync_is_made_for_the_way_and_the_time_that_the_run_has(
    overrides: list[str], made_with: dict[str, object]
) -> None:
    """Beside training nobody passes weights on; the deadline of a sync is one setting."""
    config = composed(FSDP, overrides if overrides[:1] == GLOO else STOCK_FSDP + overrides)
    derive_verl_settings(config, derive(plain(config), dataset_rows=512))
    assert OmegaConf.to_container(config.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs) == made_with


def test_no_interpolation_is_left_that_agent_loops_would_parse_for_each_answer() -> None:
    config = composed(FSDP, ["preset=tiny_cpu"])
    derive_verl_settings(config, derive(plain(config), dataset_rows=512))
    assert OmegaConf.to_container(config) == OmegaConf.to_container(config, resolve=True)


def test_verl_accepts_the_preset_in_its_own_config_types() -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = composed(FSDP, ["preset=tiny_cpu"])
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert (rollout.enable_sleep_mode, rollout.max_num_batched_tokens) == (False, 8192)
    assert rollout.checkpoint_engine.backend == "recipe_gloo"
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.strategy, actor.engine.strategy, actor.engine.dtype) == ("fsdp2", "fsdp2", "float32")


def test_an_unknown_key_is_refused_by_hydra() -> None:
    with pytest.raises(ConfigCompositionException, match="stalenes_threshold"):
        composed(FSDP, ["async_training.stalenes_threshold=1"])


def test_an_unknown_key_that_was_added_is_refused_by_the_types() -> None:
    config = plain(composed(FSDP, ["preset=tiny_cpu", "+async_training.stalenes_threshold=1"]))
    assert [str(problem) for problem in judge(config)[0] if "Did you mean" in problem.advice] != []


def test_hydra_finds_the_shared_groups_through_the_plugin() -> None:
    assert "RecipeSearchPath" in {plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["+preset=tiny_cpu"])
    assert config.trainer.device == "cpu"


def test_the_main_shows_its_configuration_from_any_directory() -> None:
    megatron = ["--config-path=config", f"--config-name={MEGATRON}.yaml", "--cfg", "job"]
    result = run_main(*megatron, *STOCK_MEGATRON)
    assert result.returncode == 0, result.stderr
    shown = OmegaConf.create(result.stdout[result.stdout.index("actor_rollout_ref:") :])
    assert shown.actor_rollout_ref.actor.strategy == "megatron"


def test_the_main_refuses_an_unknown_key_before_any_process_starts() -> None:
    result = run_main("preset=tiny_cpu", "async_training.stalenes_threshold=1")
    assert result.returncode != 0
    assert "Key 'stalenes_threshold' is not in struct" in result.stderr + result.stdout
    assert "Started a local Ray instance" not in result.stderr + result.stdout


@pytest.mark.parametrize("name", [FSDP, MEGATRON, ONE_STEP_FSDP, ONE_STEP_MEGATRON, "partial_rollout_ppo_trainer"])
def test_a_file_of_the_users_may_start_from_a_modes(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [{name}, _self_]\ntrainer: {{total_epochs: 7}}\n")
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("mine", overrides=["preset=tiny_cpu"])
    module = "recipe." + name.partition("_ppo")[0] + ".config"
    with initialize_config_module(module, version_base=None):
        assert config == compose(name, overrides=["preset=tiny_cpu", "trainer.total_epochs=7"])

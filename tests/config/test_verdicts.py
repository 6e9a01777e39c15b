# SPDX-License-Identifier: Apache-2.0
"""Each of verl's settings has a verdict: settings without effect are named, and so are those that are refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_config import ACTOR, BASE, ROLLOUT, configured, refused
from verl_keys import FILE, VERL, table

from recipe.async_engine.config.facts import FileFact
from recipe.async_engine.config.legacy import OLDER, migrated
from recipe.async_engine.config.notices import beside_others, left_behind, notices
from recipe.async_engine.config.rules import learning, names
from recipe.async_engine.config.validation import judge
from recipe.async_engine.config.verdicts import TABLE, Kind
from recipe.async_engine.config.verl_types import well_formed
from recipe.async_engine.inspection.check import look

QUEUE = "transfer_queue.backend"
SHARED_PLACES = {"async_training.placement": "shared", "actor_rollout_ref.hybrid_engine": True}
BY_FLAG = {"trainer.v1": {"trainer_mode": "recipe_fully_async"}}
REWARD_MODEL = {
    "enable": True,
    "enable_resource_pool": True,
    "nnodes": 1,
    "n_gpus_per_node": 1,
    "rollout": {"name": "vllm"},
}


def told(changes: Mapping[str, Any]) -> list[str]:
    """Return the notices of a configuration, if all of verl's own values are null."""
    problems, context = judge(configured(changes), None, ())
    assert list(map(str, problems)) == []
    return list(notices(context, {}))


def test_every_setting_of_every_configuration_of_verls_has_been_judged() -> None:
    """It fails if verl has a new setting; `verl_keys` says what to do then."""
    now, then = table(), FILE.read_text("utf-8")
    assert "NO VERDICT" not in now
    assert now.splitlines() == then.splitlines()


def test_what_has_no_effect_or_is_refused_says_what_to_do() -> None:
    for verdict in TABLE:
        assert (verdict.kind is Kind.TAKES) == (verdict.advice == ""), verdict


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({f"{ACTOR}.qat": {"enable": True}}, f"{ACTOR}.qat.enable", "quantization"),
        ({f"{ACTOR}.fsdp_config": {"qat": {"enable": True}}}, f"{ACTOR}.fsdp_config.qat.enable", "quantization"),
        ({f"{ROLLOUT}.disaggregation": {"enabled": True}}, f"{ROLLOUT}.disaggregation.enabled", "remove it"),
        ({f"{ROLLOUT}.checkpoint_manager_class": "mine.M"}, f"{ROLLOUT}.checkpoint_manager_class", "custom_backend"),
        ({f"{ROLLOUT}.prometheus": {"enable": True}}, f"{ROLLOUT}.prometheus.enable", "disable_log_stats=false"),
        (
            {"trainer.logger": ["console", "rl_insight"], f"{ROLLOUT}.disable_log_stats": True},
            f"{ROLLOUT}.disable_log_stats",
            "false with trainer.logger=rl_insight",
        ),
        (
            {"reward.reward_model": REWARD_MODEL | {"rollout": {"name": "vllm", "disaggregation": {"enabled": True}}}},
            "reward.reward_model.rollout.disaggregation.enabled",
            "remove it",
        ),
        ({"trainer.device": "npu"}, "trainer.device", "cuda or cpu"),
        ({"trainer.device": "xpu"}, "trainer.device", "cuda or cpu"),
        # Settings by their older names.
        ({"reward_model": {"enable": True}}, "reward.reward_model.enable_resource_pool", "of its own"),
        ({"reward_model": {"num_workers": 0}}, "reward.num_workers", "an integer >= 1"),
        # Names.
        (
            {f"{ROLLOUT}.checkpoint_engine.backend": "delta_sharded"},
            f"{ROLLOUT}.checkpoint_engine.backend",
            "whole versions",
        ),
        (
            {f"{ROLLOUT}.checkpoint_engine.backend": "kimi_ckpt_engine"},
            "async_training.weights.publish",
            "inline with",
        ),
        (
            {f"{ROLLOUT}.checkpoint_engine.backend": "recipe_gloo"},
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module",
            "gloo_engine",
        ),
        ({"trainer.logger": ["console", "wandbb"]}, "trainer.logger", "wandb"),
        ({"trainer.logger": "none"}, "trainer.logger", "console"),
        ({"algorithm.rollout_correction": {"loss_type": "ppo"}}, "algorithm.rollout_correction.loss_type", "ppo_clip"),
        ({f"{ROLLOUT}.trace": {"backend": "wandb"}}, f"{ROLLOUT}.trace.backend", "mlflow"),
        ({f"{ROLLOUT}.scheduling_policy": "lifo"}, f"{ROLLOUT}.scheduling_policy", "fcfs"),
        ({f"{ROLLOUT}.dtype": "bf16"}, f"{ROLLOUT}.dtype", "bfloat16"),
        ({f"{ACTOR}.fsdp_config": {"model_dtype": "bf61"}}, f"{ACTOR}.fsdp_config.model_dtype", "bf16"),
        ({"reward.reward_manager": {"source": "import"}}, "reward.reward_manager.source", "importlib"),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl": {"type": "fix"}},
            "algorithm.kl_ctrl.type",
            "fixed",
        ),
        # Engines.
        ({f"{ACTOR}.strategy": "fsdp3"}, f"{ACTOR}.strategy", "fsdp or fsdp2"),
        *(
            (
                {"model_engine": "torchtitan", f"{ACTOR}.strategy": "torchtitan", setting: value},
                "async_training.trigger_parameter_sync_step",
                "1 with",
            )
            for setting, value in (("trainer.save_freq", 1), ("async_training.proximal_log_probs", "recompute"))
        ),
        (
            {
                "model_engine": "torchtitan",
                f"{ACTOR}.strategy": "torchtitan",
                "async_training.trigger_parameter_sync_step": 1,
                "algorithm.adv_estimator": "gae",
                "critic.strategy": "torchtitan",
            },
            "critic.strategy",
            "no critic on torchtitan",
        ),
        # Values that train nothing.
        *(({f"{ROLLOUT}.temperature": value}, f"{ROLLOUT}.temperature", "> 0") for value in (0, -1)),
        *(({f"{ROLLOUT}.temperature": value}, f"{ROLLOUT}.temperature", "a number") for value in (float("nan"), "1")),
        *(({f"{ROLLOUT}.top_k": value}, f"{ROLLOUT}.top_k", "greedy") for value in (1, -2, None, 1.5)),
        ({f"{ROLLOUT}.top_p": 0}, f"{ROLLOUT}.top_p", "at most 1"),
        ({f"{ACTOR}.clip_ratio_c": 1.0}, f"{ACTOR}.clip_ratio_c", "> 1"),
        ({f"{ACTOR}.optim": {"lr_warmup_steps_ratio": 5}}, f"{ACTOR}.optim.lr_warmup_steps_ratio", "at most 1"),
        ({f"{ROLLOUT}.gpu_memory_utilization": 80}, f"{ROLLOUT}.gpu_memory_utilization", "at most 1"),
        ({f"{ROLLOUT}.val_kwargs": {"n": 0}}, f"{ROLLOUT}.val_kwargs.n", ">= 1"),
        ({"data.dataloader_num_workers": -1}, "data.dataloader_num_workers", ">= 0"),
        (
            {f"{ROLLOUT}.multi_turn": {"tool_response_truncate_side": "top"}},
            f"{ROLLOUT}.multi_turn.tool_response_truncate_side",
            "middle",
        ),
        (
            {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo": {"reweight_method": "max"}},
            "algorithm.pf_ppo.reweight_method",
            "max_min",
        ),
        ({f"{ACTOR}.ppo_epochs": 0}, f"{ACTOR}.ppo_epochs", "an integer >= 1"),
        ({f"{ACTOR}.optim": {"clip_grad": 0}}, f"{ACTOR}.optim.clip_grad", "scaled"),
        ({f"{ACTOR}.optim": {"lr": -1e-6}}, f"{ACTOR}.optim.lr", ">= 0"),
        (
            {"algorithm.rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 0}},
            "algorithm.rollout_correction.rollout_is_threshold",
            "nothing would be trained",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(changes: Mapping[str, Any], setting: str, words: str) -> None:
    problem = refused(changes)[setting]
    assert words in str(problem)


@pytest.mark.parametrize("changes", [{}, SHARED_PLACES, BY_FLAG])
@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [
        ("skip.rollout.enable", True, "always generated"),
        ("data.val_batch_size", 64, "all validation data"),
        (f"{ROLLOUT}.moe_load_balance_metrics_interval", 2, "v1"),
        ("algorithm.filter_groups.max_inflight_gen_batches", 2, "one by one"),
        ("trainer.max_critic_ckpt_to_keep", 2, "max_actor_ckpt_to_keep"),
        ("trainer.v1.separate_async.parameter_sync_step", 2, "trigger_parameter_sync_step"),
        ("trainer.v1.sampler.max_off_policy_threshold", 2, "max_staleness"),
        (f"{QUEUE}.MooncakeStore.protocol", "rdma", "TransferQueue"),
        ("data.sampler.class_path", "mine.py", "does not read it either"),
        ("data.return_full_prompt", True, "does not read it either"),
        (f"{ROLLOUT}.over_sample_rate", 0.2, "does not read it either"),
        (f"{ROLLOUT}.multi_turn.interaction_config_path", "x.yaml", "does not read it either"),
        (f"{ACTOR}.grad_clip", 0.1, "set optim.clip_grad"),
        ("async_training.use_trainer_do_validate", True, "same scores"),
        ("trainers.save_freq", 3, "neither verl nor this package"),
        ("data.truncation", "left", "filter_overlong_prompts"),
        (f"{ACTOR}.freeze_vision_tower", True, "does not read it either"),
        (f"{ACTOR}.megatron.router_replay.record_file", "x", "does not read it either"),
        (f"{ACTOR}.fsdp_config.turbo_config.distributed.tensor_parallel_size", 2, "NPUs"),
        ("actor_rollout_ref.model.mtp.speculative_num_steps", 2, "SGLang"),
        (f"{ROLLOUT}.multi_turn.enable", True, "default_agent_loop=tool_agent"),
        ("trainer.del_local_ckpt_after_load", True, "not deleted"),
    ],
)
def test_what_has_no_effect_is_said_with_what_to_use(
    changes: Mapping[str, Any], setting: str, value: Any, advice: str
) -> None:
    base = (
        {} if changes is not SHARED_PLACES else {"data.train_batch_size": 16, "async_training.staleness_threshold": 1}
    )
    base |= {"async_training.trigger_parameter_sync_step": 1, "async_training.require_batches": 1}
    before = told(base | changes)
    (said,) = [notice for notice in told(base | changes | {setting: value}) if notice not in before]
    assert (
        f"{setting}={str(value).lower() if isinstance(value, bool) else value}" in said or setting.split(".")[0] in said
    )
    assert "no effect" in said
    assert advice in said


def test_a_setting_that_is_as_another_one_is_said_where_it_is_not() -> None:
    defaults = {"critic": {"rollout_n": "${oc.select:actor_rollout_ref.rollout.n,1}", "forward_x": "${.ppo_x}"}}
    for number, count in ((8, 0), (4, 1)):
        _, context = judge(configured({"critic": {"rollout_n": number}}), None, ())
        assert len([said for said in notices(context, defaults) if "critic.rollout_n=4" in said]) == count


def test_what_a_script_adds_and_nobody_reads_is_said() -> None:
    defaults = {"trainer": {"nnodes": 1}, "data": {"custom_cls": {"path": None}, "apply_chat_template_kwargs": {}}}
    changes = {
        "trainer.use_legacy_worker_impl": "disable",
        "trainer.wandb_proxy": "http://proxy",
        "trainer.tensorboard_dir": None,
        "data.custom_cls": {"path": None, "nam": "Mine"},
        "data.apply_chat_template_kwargs": {"enable_thinking": False},
    }
    _, context = judge(configured(changes), None, ())
    (said,) = [said for said in notices(context, defaults) if "code of yours" in said]
    assert "trainer.use_legacy_worker_impl=disable" in said and "data.custom_cls.nam=Mine" in said
    assert not [name for name in ("wandb_proxy", "tensorboard_dir", "enable_thinking") if name in said]


def test_what_verl_drops_of_older_rewards_is_said() -> None:
    older = {
        "reward_manager": "dapo",
        "overlong_buffer": {"enable": True},
        "micro_batch_size": None,
        "model": {"path": "m", "input_tokenizer": "t"},
        "rollout": {"n": 2},
        "use_reward_loop": True,
    }
    said = list(left_behind({"reward_model": older}))
    assert [notice.split("=")[0].removeprefix("reward_model.") for notice in said] == [
        *("overlong_buffer.enable", "model.input_tokenizer", "use_reward_loop")
    ]
    assert "set reward.reward_kwargs.overlong_buffer_cfg" in said[0]
    for nothing in ({}, {"reward_model": None}, {"reward_model": {}}):
        assert list(left_behind(nothing)) == []
    found = look(configured({"reward_model": older}), with_verl=False)
    assert [notice for notice in found.warnings if "overlong_buffer" in notice]


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        (f"{ACTOR}.entropy_coeff", "x", "a number"),
        (f"{ACTOR}.entropy_coeff", float("nan"), "a number"),
        (f"{ACTOR}.optim", {"betas": 0.9}, "a list"),
        (f"{ACTOR}.shuffle", "yes", "true or false"),
        (f"{ROLLOUT}.enforce_eager", "x", "true or false"),
        ("algorithm.kl_ctrl", {"kl_coef": "0.001"}, "a number"),
        ("algorithm.kl_ctrl", {"horizon": [1]}, "a number"),
        ("data.apply_chat_template_kwargs", "enable_thinking=False", "a section of settings"),
        ("trainer.project_name", {"a": 1}, "text"),
        ("trainer.project_name", "???", "a value"),
        ("trainer.val_only", "x", "true or false"),
    ],
)
def test_a_value_of_another_kind_than_verls_is_refused_by_name(setting: str, value: Any, allowed: str) -> None:
    name = (
        f"{setting}.{next(iter(value))}" if isinstance(value, dict) and setting != "trainer.project_name" else setting
    )
    (problem,) = [item for item in look(configured({setting: value}), with_verl=False).problems if item.setting == name]
    assert problem.allowed == allowed


def test_kinds_that_verl_takes_are_accepted() -> None:
    verl = OmegaConf.to_container(OmegaConf.load(VERL / "trainer/config/_generated_ppo_trainer.yaml"))
    # verl's own values are interpolations of other settings.
    assert [one for one in well_formed(migrated(verl))[1] if "${" not in one.value] == []
    taken = {
        "trainer": {"experiment_name": 20261127, "logger": "console", "balance_batch": 0, "rollout_data_dir": "3"},
        "algorithm": {"rollout_correction": {"rollout_is_threshold": "0.5_2.0"}, "kl_ctrl": {"kl_coef": 1}},
        "actor_rollout_ref": {"model": {"target_modules": ["q_proj"]}, "actor": {"entropy_coeff": None}},
    }
    assert well_formed(taken, misses=False)[1] == []


def test_a_checkpoint_to_resume_from_that_no_mode_reads_is_said() -> None:
    changes = {"trainer.resume_from_path": "/runs/global_step_5", "trainer.resume_mode": "auto"}
    said = list(beside_others(judge(configured(changes), None, ())[1]))
    assert said == [
        "trainer.resume_from_path=/runs/global_step_5 has no effect with trainer.resume_mode=auto: set resume_path"
    ]
    changes["trainer.resume_mode"] = "resume_path"
    assert list(beside_others(judge(configured(changes), None, ())[1])) == []


@pytest.mark.parametrize("name", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
def test_a_folder_that_cannot_be_made_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, count in ((tmp_path / "file", 1), (tmp_path / "file/run", 1), (tmp_path / "a b/\u00e9", 0)):
        found = look(configured({f"trainer.{name}": str(path)}), with_verl=False).problems
        assert len([problem for problem in found if problem.setting == f"trainer.{name}"]) == count


def test_lengths_of_engines_are_the_datas() -> None:
    setting = f"{ROLLOUT}.response_length"
    assert "data.max_response_length" in str(refused({setting: 7, "data.max_response_length": 8})[setting])
    assert setting not in refused({setting: 8, "data.max_response_length": 8})


def test_resampling_without_a_critic_is_said_to_have_no_effect() -> None:
    def said(changes: Mapping[str, Any]) -> list[str]:
        return list(beside_others(judge(configured(changes), None, ())[1]))

    assert "adv_estimator=gae alone" in said({"algorithm.use_pf_ppo": True})[0]
    assert said({"algorithm.use_pf_ppo": True, "algorithm.adv_estimator": "gae"}) == said({}) == []


def test_resources_of_v1_are_told_by_a_main_and_taken_by_a_flag() -> None:
    (said,) = [notice for notice in told({f"{ROLLOUT}.nnodes": 2}) if "nnodes=2" in notice]
    assert "set rollout.nnodes" in said
    assert [notice for notice in told({f"{ROLLOUT}.nnodes": 2} | BY_FLAG) if "nnodes=2" in notice] == []


def test_accelerators_of_generation_have_no_effect_where_it_has_the_trainers() -> None:
    in_turns = SHARED_PLACES | {"data.train_batch_size": 16, "async_training.staleness_threshold": 1}
    in_turns |= {"async_training.trigger_parameter_sync_step": 1, "async_training.require_batches": 1}
    for setting in ("rollout.nnodes", "rollout.n_gpus_per_node", f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"):
        (said,) = [notice for notice in told(in_turns | {setting: 2}) if f"{setting}=2" in notice]
        assert "no effect: the rollout shares the trainer's accelerators: set trainer.nnodes" in said


def test_ranks_that_share_a_sequence_are_those_of_each_engine() -> None:
    sizes = {"model_engine": "veomni", f"{ACTOR}.strategy": "veomni", "trainer.n_gpus_per_node": 4}
    split = {f"{ACTOR}.veomni": {"ulysses_parallel_size": 4}, f"{ACTOR}.ppo_mini_batch_size": 15}
    # 15 prompts with 8 answers would not divide by 4 ranks without sequence parallelism of their own.
    assert refused(sizes | {f"{ACTOR}.ppo_mini_batch_size": 15, f"{ROLLOUT}.n": 7, "rollout.n": 7}).keys() >= {
        f"{ACTOR}.ppo_mini_batch_size"
    }
    assert f"{ACTOR}.ppo_mini_batch_size" not in refused(sizes | split | {f"{ROLLOUT}.n": 7, "rollout.n": 7})
    titan = {"model_engine": "torchtitan", f"{ACTOR}.strategy": "torchtitan", "trainer.n_gpus_per_node": 4}
    assert "trainer.n_gpus_per_node" in refused(titan | {f"{ACTOR}.torchtitan": {"tensor_parallel_size": 3}})


def test_what_leaves_the_policy_as_it_is_is_said() -> None:
    def said(changes: Mapping[str, Any]) -> list[str]:
        return list(learning.trains_nothing(judge(configured(changes), None, ())[1]))

    assert said({}) == []
    assert said({f"{ACTOR}.optim": {"lr": 0}}) == [f"{ACTOR}.optim.lr=0: the policy stays as it is"]
    assert len(said({"trainer.critic_warmup": 5, "trainer.total_training_steps": 5})) == 1


def test_an_engine_that_nobody_tried_is_said_and_a_described_agent_loop_is_known() -> None:
    changes = {f"{ROLLOUT}.checkpoint_engine.backend": "nixl"}
    assert [said for said in names.untried(judge(configured(changes), None, ())[1]) if "never tried" in said]
    loops = {f"{ROLLOUT}.agent": {"num_workers": 1, "default_agent_loop": "mine"}}
    setting = f"{ROLLOUT}.agent.agent_loop_config_path"
    for columns, count in ((("mine",), 0), (("other",), 1)):
        fact = FileFact(setting, "loops.yaml", "description", columns=columns)
        assert len(names.unusual(judge(configured(loops), None, [fact])[1])) == count


def _a_section(chance: random.Random, section: Any) -> Any:
    """Return the section with some of its null values replaced."""
    if isinstance(section, dict):
        return {name: _a_section(chance, value) for name, value in section.items()}
    return chance.choice((None, "x", 3, True)) if section is None and chance.random() < 0.5 else section


def test_older_names_are_moved_as_verl_moves_them() -> None:
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    whole = OmegaConf.load(VERL / "trainer/config/_generated_ppo_trainer.yaml")
    old = OmegaConf.to_container(OmegaConf.load(VERL / "trainer/config/legacy_reward_impl.yaml"))
    reward = OmegaConf.to_container(whole.reward, resolve=False)
    chance = random.Random(0)
    for number in range(60):
        filled = _a_section(chance, old)
        if number % 2:
            filled["reward_model"]["reward_kwargs"] = {"a": 1}
        config = {"reward": reward, "other": {"x": 1}, **filled}
        given = copy.deepcopy(config)
        ours = migrated(config)
        assert config == given
        verls = OmegaConf.to_container(migrate_legacy_reward_impl(OmegaConf.create(given)), resolve=False)
        assert ours == verls
    assert set(OLDER) <= {f"reward_model.{name}" for name in (*old["reward_model"], "model.path", "reward_kwargs")}


def test_a_run_says_what_of_its_script_has_no_effect(tmp_path: Path) -> None:
    """The values are compared with those of the installed verl."""
    found = look(configured({f"{ROLLOUT}.engine_kwargs": {"sglang": {"x": 1}}, f"{ROLLOUT}.layered_summon": False}))
    assert [said for said in found.warnings if "engine_kwargs.sglang.x=1 has no effect" in said]
    assert not [said for said in found.warnings if "layered_summon" in said]
    assert BASE["trainer"]["device"] == "cuda"

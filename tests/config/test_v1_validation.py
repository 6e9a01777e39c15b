# SPDX-License-Identifier: Apache-2.0
"""Configurations of verl's own trainers are read, or refused with the settings' names."""

from typing import Any

import pytest

from recipe.async_engine.config.facts import FileFact
from recipe.async_engine.config.problems import ConfigError
from recipe.async_engine.config.sections import RolloutResources
from recipe.async_engine.config.v1_validation import MANAGER, as_placed, judge_v1, read_v1
from recipe.plan.memory import estimate as memory
from recipe.plan.memory.shape import known_model

ROLLOUT = "actor_rollout_ref.rollout"
SERVERS = "model_engine_server"


def config(device: str = "cuda", servers: dict[str, Any] | None = None, **rollout: Any) -> dict[str, Any]:
    """Return a configuration that can run, with the changes ``rollout`` to settings of the rollout."""
    agent, engine = {"agent_loop_manager_class": MANAGER}, {"backend": "nccl"}
    return {
        "trainer": {"device": device},
        "actor_rollout_ref": {
            "actor": {"use_kl_loss": True, "use_dynamic_bsz": True},
            "ref": {"log_prob_use_dynamic_bsz": True},
            "rollout": {
                "name": "vllm",
                "agent": agent,
                "checkpoint_engine": engine,
                "log_prob_use_dynamic_bsz": True,
                **rollout,
            },
        },
        SERVERS: servers or {"backend": "fsdp2", "n_gpus_per_node": 2},
    }


def refused(settings: dict[str, Any]) -> dict[str, str]:
    """Return the problems as text, by setting."""
    with pytest.raises(ConfigError) as error:
        read_v1(settings)
    return {problem.setting: str(problem) for problem in error.value.problems}


def test_what_can_run_is_read() -> None:
    assert read_v1(config()).servers.ranks == 2
    without = config(servers={"backend": "disabled"}, agent={}, checkpoint_engine={"backend": "naive"})
    assert not read_v1(without).servers.enabled


def test_what_log_prob_servers_need_is_refused_by_name() -> None:
    assert set(refused(config(name="sglang"))) == {f"{ROLLOUT}.name"}
    assert set(refused(config(agent={}))) == {f"{ROLLOUT}.agent.agent_loop_manager_class"}
    references = {"backend": "fsdp2", "reference_replicas": 1}
    assert set(refused(config(servers=references))) == {f"{SERVERS}.reference_replicas"}
    assert set(refused({**config(), "async_training": {"proximal_log_probs": "bypass"}})) == {
        "async_training.proximal_log_probs"
    }
    assert set(refused(config(servers={"backend": "fsdp2", "replicas": 3}))) == {f"{SERVERS}.replicas"}
    assert set(refused({SERVERS: {"backend": "fsdp"}})) == {f"{SERVERS}.backend"}


def test_rehearsal_without_a_run_is_refused_where_the_trainer_is_verls() -> None:
    found = refused({**config(), "rehearse_only": True})
    assert "+recipe=fully_async" in found["rehearse_only"]


def test_teachers_are_for_our_own_trainers() -> None:
    found = refused({**config(), "distillation": {"enabled": True}})
    assert "verl's trainer without +recipe" in found["distillation.enabled"]


@pytest.mark.parametrize(("device", "backend"), [("cpu", "recipe_gloo"), ("cuda", "nccl")])
def test_backend_that_does_not_reach_the_servers_is_refused_with_one_that_does(device: str, backend: str) -> None:
    problems = refused(config(device=device, checkpoint_engine={"backend": "naive"}))
    assert list(problems) == [f"{ROLLOUT}.checkpoint_engine.backend"]
    assert f"set {ROLLOUT}.checkpoint_engine.backend={backend}." in problems[f"{ROLLOUT}.checkpoint_engine.backend"]


def test_sizes_that_do_not_divide_the_ranks_are_refused_by_name() -> None:
    engine = {"ulysses_sequence_parallel_size": 4}
    settings = config(servers={"backend": "fsdp2", "n_gpus_per_node": 2, "engine": engine})
    settings["trainer"] |= {"nnodes": 1, "n_gpus_per_node": 8}
    settings["actor_rollout_ref"]["actor"]["fsdp_config"] = {"fsdp_size": 3}
    assert set(refused(settings)) == {
        "actor_rollout_ref.actor.fsdp_config.fsdp_size",
        f"{SERVERS}.engine.ulysses_sequence_parallel_size",
    }


def test_what_verls_separate_trainer_asserts_with_ray_up_is_refused_by_name() -> None:
    settings = config(checkpoint_engine={"backend": "naive"}, agent={}, servers={"backend": "disabled"}, nnodes=0)
    settings["data"] = {"train_batch_size": 100}
    settings["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 32
    settings["trainer"]["v1"] = {"separate_async": {"parameter_sync_step": 4}}
    with pytest.raises(ConfigError) as error:
        read_v1(settings, "separate_async")
    assert {problem.setting: problem.allowed for problem in error.value.problems} == {
        "data.train_batch_size": "parameter_sync_step x ppo_mini_batch_size, 128",
        f"{ROLLOUT}.nnodes": "an integer >= 1",
        f"{ROLLOUT}.n_gpus_per_node": "an integer >= 1",
        f"{ROLLOUT}.checkpoint_engine.backend": "a backend that reaches other processes",
    }


@pytest.mark.parametrize("lacking", ["parameter_sync_step", "ppo_mini_batch_size"])
def test_batch_of_verls_separate_trainer_is_judged_where_both_of_its_factors_are_known(lacking: str) -> None:
    settings = config(nnodes=1, n_gpus_per_node=2)
    settings["data"] = {"train_batch_size": 100}
    if lacking != "ppo_mini_batch_size":
        settings["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 32
    if lacking != "parameter_sync_step":
        settings["trainer"]["v1"] = {"separate_async": {"parameter_sync_step": 4}}
    assert judge_v1(settings, "separate_async")[0] == []


@pytest.mark.parametrize(("device", "backend"), [("cpu", "recipe_gloo"), ("cuda", "nccl")])
def test_verls_separate_trainer_needs_a_backend_that_leaves_its_process(device: str, backend: str) -> None:
    alone = {"servers": {"backend": "disabled"}, "nnodes": 1, "n_gpus_per_node": 2}
    assert judge_v1(config(device, checkpoint_engine={"backend": backend}, **alone), "separate_async")[0] == []
    (problem,) = judge_v1(config(device, checkpoint_engine={"backend": "naive"}, **alone), "separate_async")[0]
    assert f"set {ROLLOUT}.checkpoint_engine.backend={backend}." in str(problem)


@pytest.mark.parametrize(("trainer", "placement"), [("separate_async", "separate"), ("colocate_async", "shared")])
def test_where_verls_trainers_generate_is_by_their_name_and_verls_own_defaults(trainer: str, placement: str) -> None:
    for sizes, expected in (
        ({}, RolloutResources(1, 8)),
        ({"nnodes": 3, "n_gpus_per_node": 2}, RolloutResources(3, 2)),
    ):
        settings = as_placed(judge_v1(config(**sizes), "")[1], trainer).settings
        assert (settings.rollout, settings.async_training.placement) == (expected, placement)


def test_a_model_that_does_not_divide_is_refused_for_verls_trainers_too() -> None:
    # The model has 14 attention heads.
    model = FileFact("actor_rollout_ref.model.path", "x", "model", model_config=known_model("Qwen/Qwen2.5-0.5B"))
    problems, _ = judge_v1(config(tensor_model_parallel_size=4), "", files=[model], judges=[memory])
    assert [problem.setting for problem in problems] == [f"{ROLLOUT}.tensor_model_parallel_size"]

# SPDX-License-Identifier: Apache-2.0
"""Names that verl looks up late are asked of verl's own registries before a run's processes are made."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from verl.utils.torch_dtypes import BFLOAT_LIST, FLOAT_LIST, HALF_LIST
from verl.utils.tracking import Tracking
from vllm.config.model import ModelDType
from vllm.config.scheduler import SchedulerPolicy

from recipe.async_engine.config.problems import ConfigError
from recipe.async_engine.config.rules.names import BACKEND, DTYPES, LOGGERS, NAMES, UNTRIED_ENGINES
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT
from recipe.async_engine.inspection.check import check_types, look, plain

EXTERNAL = "actor_rollout_ref.model.external_lib"
MINE = """
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

@register_adv_est("my_estimator")
def advantages(**kwargs):
    raise NotImplementedError

@register_policy_loss("my_loss")
def loss(**kwargs):
    raise NotImplementedError
"""


def registry(name: Any) -> Any:
    module, _, path = name.registry.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def test_the_names_are_verls() -> None:
    for name in (name for name in NAMES if name.registry):
        theirs = {key for key in registry(name) if not key.startswith(("recipe_", "my_"))}
        if name.setting == BACKEND:
            # Those that need packages are registered where these are.
            theirs |= {"nccl", *UNTRIED_ENGINES, "delta_sharded"}
        if name.registry.startswith("verl"):
            assert set(name.own) == theirs, name.setting
        else:
            assert set(name.own) - theirs <= {"eager"}, name.setting
    assert set(LOGGERS) == {*Tracking.supported_backend, "tracking"}
    known = {name.setting: set(name.own) for name in NAMES}
    assert known[f"{ROLLOUT}.dtype"] == set(typing.get_args(ModelDType))
    assert known[f"{ROLLOUT}.scheduling_policy"] == set(typing.get_args(SchedulerPolicy))
    assert set(DTYPES) <= {*BFLOAT_LIST, *FLOAT_LIST, *HALF_LIST}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("names")
    (folder / "config.json").write_text("{}")
    return [f"actor_rollout_ref.model.path={folder}", "preset=tiny_cpu"]


def configured(base: list[str], *more: str) -> dict[str, Any]:
    GlobalHydra.instance().clear()
    with initialize_config_module("recipe.fully_async.config", version_base=None):
        return plain(compose("fully_async_ppo_trainer", overrides=[*base, *more]))


@pytest.mark.parametrize(
    ("setting", "value", "known"),
    [
        ("algorithm.adv_estimator", "grop", "grpo"),
        (f"{ACTOR}.policy_loss.loss_mode", "gpso", "gspo"),
        ("reward.reward_manager.name", "dpao", "dapo"),
        (f"{ROLLOUT}.agent.default_agent_loop", "tool_agnet", "tool_agent"),
        (f"{ROLLOUT}.multi_turn.format", "herms", "hermes"),
        (f"{ROLLOUT}.checkpoint_engine.backend", "recipe_glo", "recipe_gloo"),
        (f"{ROLLOUT}.checkpoint_engine.backend", "hccl", "nccl"),
        ("actor_rollout_ref.model.override_config.attn_implementation", "spda", "sdpa"),
        (f"{ACTOR}.optim.optimizer", "AdmaW", "AdamW"),
    ],
)
def test_a_name_that_nobody_registered_is_refused_by_the_main(
    base: list[str], setting: str, value: str, known: str
) -> None:
    # On a CPU every engine but this package's is refused, whatever its name.
    device = ["trainer.device=cuda"] if value == "hccl" else []
    found = look(configured(base, f"{setting}={value}", *device), makes_task=True).problems
    problems = {problem.setting: problem for problem in found}
    assert known in problems[setting].allowed or value == "recipe_glo"
    assert problems[setting].value == value


def test_a_logger_whose_package_is_missing_is_refused_by_the_main(base: list[str]) -> None:
    (problem,) = look(configured(base, "trainer.logger=[console,swanlab]"), makes_task=True).problems
    assert (problem.setting, problem.value) == ("trainer.logger", "swanlab")
    assert "not installed" in problem.advice


def test_names_of_the_users_module_are_left_to_the_trainers_process_which_imports_it(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_algorithms.py").write_text(MINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["algorithm.adv_estimator=my_estimator", f"{ACTOR}.policy_loss.loss_mode=my_loss"]
    mine = configured(base, f"{EXTERNAL}=my_algorithms", *names)
    assert look(mine, makes_task=True).problems == []
    assert {problem.setting for problem in look(configured(base, *names), makes_task=True).problems} == {
        name.partition("=")[0] for name in names
    }
    check_types(mine)
    with pytest.raises(ConfigError, match="my_estimaator"):
        check_types(configured(base, f"{EXTERNAL}=my_algorithms", "algorithm.adv_estimator=my_estimaator"))


def test_a_module_of_the_users_that_fails_is_named_in_the_trainers_process(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_faulty.py").write_text("import no_such_package_of_mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    faulty = configured(base, f"{EXTERNAL}=my_faulty", "algorithm.adv_estimator=my_estimator2")
    with pytest.raises(ConfigError, match=rf"{EXTERNAL}=my_faulty.*no_such_package_of_mine"):
        check_types(faulty)

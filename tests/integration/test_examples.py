# SPDX-License-Identifier: Apache-2.0
"""Every example script: its arguments compose, validate against the cluster that it names, and have a plan."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from recipe.async_engine.inspection.check import plain
from recipe.async_engine.model_engine.launch import engine_config
from recipe.async_engine.settings.facts import Resources
from recipe.async_engine.settings.log_prob_servers import Proximal
from recipe.async_engine.settings.plan import derive, rollout_accelerators
from recipe.async_engine.settings.sections import SHARED
from recipe.async_engine.settings.validation import validate

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.sh"))
SHOW_ARGUMENTS = 'python() { printf "%s\\n" "$@"; }; export -f python; exec bash "$0"'
MODES = re.compile(r"^(\w+)\)$", re.MULTILINE)


def cases() -> list[tuple[Path, str | None]]:
    """Each script with each of the modes that it offers; None where it has one."""
    return [(script, mode) for script in EXAMPLES for mode in (MODES.findall(script.read_text()) or [None])]


def shown(script: Path, mode: str | None) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": "/home/someone", "PATH": os.environ["PATH"]} | ({"MODE": mode} if mode else {})
    return subprocess.run(
        ["bash", "-c", SHOW_ARGUMENTS, str(script)],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment,
        check=False,
    )


def arguments(script: Path, mode: str | None) -> tuple[str, str, list[str]]:
    """The mode, the primary configuration and the overrides that a script runs its main with."""
    finished = shown(script, mode)
    assert finished.returncode == 0, finished.stderr
    _, main, *rest = finished.stdout.splitlines()
    name = re.fullmatch(r"recipe\.(\w+)\.main", main).group(1)
    if rest[0] == "--config-name":
        return name, rest[1], rest[2:]
    return name, f"{name}_ppo_trainer", rest


@pytest.mark.parametrize(("script", "mode"), cases(), ids=[f"{script.stem} {mode or ''}" for script, mode in cases()])
def test_example_composes_validates_and_has_a_plan(script: Path, mode: str | None) -> None:
    name, primary, overrides = arguments(script, mode)
    GlobalHydra.instance().clear()
    with initialize_config_module(f"recipe.{name}.config", version_base=None):
        composed = compose(primary, overrides=overrides)
    config = plain(composed)
    plan = derive(config, dataset_rows=7000)
    servers = plan.settings.servers
    shared = plan.settings.async_training.placement == SHARED
    generating = 0 if shared else rollout_accelerators(config, plan.settings)
    accelerators = plan.trainer_ranks + generating + servers.accelerators
    named = sum(map(int, re.search(r"_(\d+(?:_\d+)*)$", script.stem).group(1).split("_")))
    # The one script for "1 to 2": it takes the first of them in turns.
    assert accelerators == (1 if shared and named == 2 else named)
    assert validate(config, dataset_rows=7000, available=Resources(accelerators=accelerators)) == []
    assert validate(config, dataset_rows=7000, available=Resources(accelerators=accelerators - 1)) != []
    assert (plan.proximal is Proximal.SERVER) == servers.enabled
    if servers.enabled:
        engine = engine_config(OmegaConf.create(config["model_engine_server"]["engine"]), servers)
        assert engine.strategy == servers.backend
        assert not engine.param_offload
        assert engine.forward_only == (servers.backend == "megatron")
    actor = OmegaConf.create(config["actor_rollout_ref"]["actor"])
    assert omega_conf_to_dataclass(actor.optim).lr == 1e-6


def test_there_are_examples() -> None:
    assert len(cases()) >= 17


def test_mode_that_a_script_does_not_have_is_refused_by_it() -> None:
    finished = shown(next(script for script, mode in cases() if mode), "asynchronous")
    assert finished.returncode == 2
    assert "MODE=asynchronous: one of one_step_off, fully_async" in finished.stderr

# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
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

from recipe.async_engine.config.inspect import plain
from recipe.async_engine.core.config import derive
from recipe.async_engine.core.outside import Resources
from recipe.async_engine.core.server_settings import Proximal
from recipe.async_engine.core.validation import validate
from recipe.async_engine.model_engine.launch import engine_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.sh"))
SHOW_ARGUMENTS = 'python() { printf "%s\\n" "$@"; }; export -f python; exec bash "$0"'
PRIMARY = {"fully_async": "fully_async_ppo_trainer", "one_step_off": "one_step_off_ppo_trainer"}


def arguments(script: Path) -> tuple[str, str, list[str]]:
    """The mode, the primary configuration and the overrides that a script runs its main with."""
    environment = {"HOME": "/home/someone", "PATH": os.environ["PATH"]}
    shown = subprocess.run(
        ["bash", "-c", SHOW_ARGUMENTS, str(script)],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment,
        check=True,
    )
    _, main, *rest = shown.stdout.splitlines()
    mode = re.fullmatch(r"recipe\.(\w+)\.main", main).group(1)
    if rest[0] == "--config-name":
        return mode, rest[1], rest[2:]
    return mode, PRIMARY[mode], rest


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_composes_validates_and_has_a_plan(script: Path) -> None:
    mode, name, overrides = arguments(script)
    GlobalHydra.instance().clear()
    with initialize_config_module(f"recipe.{mode}.config", version_base=None):
        composed = compose(name, overrides=overrides)
    config = plain(composed)
    accelerators = sum(map(int, re.search(r"_(\d+(?:_\d+)*)$", script.stem).group(1).split("_")))
    assert validate(config, dataset_rows=7000, available=Resources(accelerators=accelerators)) == []
    assert validate(config, dataset_rows=7000, available=Resources(accelerators=accelerators - 1)) != []
    plan = derive(config, dataset_rows=7000)
    servers = plan.settings.servers
    assert (plan.proximal is Proximal.SERVER) == servers.enabled
    if servers.enabled:
        engine = engine_config(OmegaConf.create(config["model_engine_server"]["engine"]), servers)
        assert engine.strategy == servers.backend
        assert not engine.param_offload
        assert engine.forward_only == (servers.backend == "megatron")
    actor = OmegaConf.create(config["actor_rollout_ref"]["actor"])
    assert omega_conf_to_dataclass(actor.optim).lr == 1e-6


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2

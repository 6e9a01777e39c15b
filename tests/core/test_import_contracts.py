# SPDX-License-Identifier: Apache-2.0
"""`make lint` fails where a room imports one above it; the contracts are in pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
LINT = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"


@pytest.mark.parametrize(
    ("module", "planted", "broken"),
    [
        ("core/gate.py", "import ray", "recipe.async_engine.core is not allowed to import ray"),
        ("config/plan.py", "from torch import Tensor", "recipe.async_engine.config is not allowed to import torch"),
        (
            "core/prompt_manager.py",
            "from recipe.async_engine.record.events import Event",
            "recipe.async_engine.core is not allowed to import recipe.async_engine.record",
        ),
        (
            "rollout/scheduler.py",
            "from recipe.async_engine.record.figures import sides",
            "recipe.async_engine.rollout is not allowed to import recipe.async_engine.record.figures",
        ),
        (
            "weights/publisher.py",
            "from recipe.async_engine.rollout.scheduler import Scheduler",
            "recipe.async_engine.weights is not allowed to import recipe.async_engine.rollout",
        ),
        ("trainer/base.py", "import vllm", "recipe.async_engine.trainer is not allowed to import vllm"),
        (
            "trainer/base.py",
            "from recipe.fully_async import trainer",
            "recipe.async_engine is not allowed to import recipe.fully_async",
        ),
        *(
            (
                "run/driver.py",
                f"from recipe import {beside}",
                f"recipe.async_engine is not allowed to import recipe.{beside}",
            )
            for beside in ("agents", "laptop", "plan", "programs", "report")
        ),
        ("attic/__init__.py", "", "recipe.async_engine.attic (Since this contract is marked as 'exhaustive'"),
    ],
)
def test_an_import_of_a_room_above_is_refused(tmp_path: Path, module: str, planted: str, broken: str) -> None:
    for folder in ("recipe", "hydra_plugins"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    file = tmp_path / "recipe/async_engine" / module
    file.parent.mkdir(exist_ok=True)
    file.write_text((file.read_text() if file.exists() else "") + f"\n{planted}\n")
    lint = [sys.executable, "-c", LINT, "--no-cache"]
    finished = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 1
    assert broken in " ".join(finished.stdout.split())

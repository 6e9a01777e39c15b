# SPDX-License-Identifier: Apache-2.0
"""Another package with the name of a mode: each main names both places and ends before it starts anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


def run_beside(other: Path, main: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(other), str(CHECKOUT)])
    overrides = ["preset=tiny_cpu", f"trainer.default_local_dir={folder}", f"hydra.run.dir={folder}"]
    return subprocess.run(
        [sys.executable, "-m", main, *overrides],
        env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("shadowed", "main"),
    [("partial_rollout", "recipe.fully_async.main"), ("fully_async", "recipe.partial_rollout.main")],
)
def test_a_main_beside_another_package_of_a_modes_name_names_both_and_ends(
    shadowed: str, main: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    package = other / "recipe" / shadowed
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    folder = tmp_path / "run"
    folder.mkdir()
    ended = run_beside(other, main, folder)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.strip().startswith("WrongInstallation")
    assert str(package) in ended.stderr
    assert str(CHECKOUT / "recipe" / shadowed) in ended.stderr
    assert not (folder / "task").exists()
    assert not (folder / "summary.json").exists()

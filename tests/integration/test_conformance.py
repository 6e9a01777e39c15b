# SPDX-License-Identifier: Apache-2.0
"""The tests for a CPU that verl 0.9.1 has in its wheel: the same passes and failures with and without the plugin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from xml.etree import ElementTree

import pytest
from surroundings import user_environment

SUFFIX = "_on_cpu.py"
RUN_S = 900
# The least that shows that they ran: verl's files and their tests, most of which pass without a network.
FILES, PASSED = 25, 200


def copy_tests(folder: Path) -> list[str]:
    """verl's test files for a CPU, and the modules beside them, without those that other packages install there."""
    files = [path for path in distribution("verl").files or () if path.parts[0] == "tests" and path.suffix == ".py"]
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path.locate(), folder / path)
    return sorted(str(path) for path in files if path.name.endswith(SUFFIX))


def outcomes(folder: Path, tests: list[str], plugins: str) -> dict[str, str]:
    """By test: passed, failed, error or skipped."""
    report = folder / f"{plugins}.xml"
    environment = {**user_environment(), "VERL_USE_EXTERNAL_PLUGINS": plugins, "HF_HUB_OFFLINE": "1"}
    options = [
        "-q",
        "-c",
        os.devnull,
        "--rootdir=.",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "-o",
        "addopts=",
    ]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert report.is_file(), finished.stdout[-8000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    return found


@pytest.mark.e2e
@pytest.mark.slow
def test_verls_own_tests_end_in_the_same_way_with_and_without_the_plugin(tmp_path: Path) -> None:
    tests = copy_tests(tmp_path)
    assert len(tests) >= FILES
    # Side by side: most of their time is spent waiting.
    with ThreadPoolExecutor() as pool:
        without, enabled = pool.map(lambda plugins: outcomes(tmp_path, tests, plugins), ("none", "auto"))
    assert Counter(without.values())["passed"] >= PASSED, Counter(without.values())
    assert enabled == without

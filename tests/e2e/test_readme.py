# SPDX-License-Identifier: Apache-2.0
"""The README's own commands: a run on data of one's own, word for word."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from main_process import last_words
from surroundings import user_environment

README = Path(__file__).parents[2] / "README.md"
ACTIVATE = re.compile(r"^\. \.venv/bin/activate.*$", re.MULTILINE)
RUN_S = 900


@pytest.mark.e2e
@pytest.mark.vllm("commands of the README, word for word")
@pytest.mark.slow
def test_a_run_on_own_data_by_the_commands_of_the_readme(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    (commands,) = [block for block in blocks if "my_train.parquet" in block]
    script = ACTIVATE.sub("set -e", commands)
    environment = user_environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    finished = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert finished.returncode == 0, last_words(finished)
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert (summary["steps"], summary["error"]) == (30, None)
    assert summary["validation"]["last"] > summary["validation"]["first"]

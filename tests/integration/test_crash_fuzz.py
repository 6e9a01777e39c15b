# SPDX-License-Identifier: Apache-2.0
"""`kill -9` at 200 random moments: every resumed run trains each prompt exactly once relative to its checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

DRILL = Path(__file__).with_name("crash_run.py")
KILLS, SEEDS = 100, (1, 2)
# What a kill may hit; "start" is over before the first one.
PHASES = {
    "load",
    "generate",
    "train",
    "publish",
    "write rollout side",
    "write model",
    "write tracker",
    "commit",
    "retain",
}


@pytest.mark.chaos
def test_every_prompt_is_trained_once_whenever_the_process_is_killed(tmp_path: Path) -> None:
    drills = []
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        folder.mkdir()
        arguments = [sys.executable, str(DRILL), str(folder), str(KILLS), str(seed)]
        drills.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found = []
    for drill in drills:
        # What a life asserts ends the drill.
        output, errors = drill.communicate(timeout=500)
        assert drill.returncode == 0, errors[-5000:]
        found.append(json.loads(output))
    hit: Counter[str] = sum((Counter(drill["by_phase"]) for drill in found), Counter())
    assert hit.total() >= KILLS * len(SEEDS)
    assert set(hit) == PHASES
    # Each life found the complete answers of its checkpoint again; some checkpoints had such answers.
    assert any(drill["ready"] for drill in found)

# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint as stock verl writes it begin a run, and nothing else of it.

With a real stock run: tests/e2e/test_stock_mains.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from recipe.async_engine.record.contents import without_weights


def test_weights_of_a_stock_checkpoint_are_loaded_bit_for_bit_and_nothing_else_of_it(tmp_path: Path) -> None:
    script = Path(__file__).with_name("stock_checkpoint.py")
    finished = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "VERL_PLATFORM": "cpu"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["differed"] and found["equal"]
    # What it was trained with is not carried, and its own checkpoints are loaded as a whole again.
    assert (found["optimizer"], found["lr"]) == (0, 1e-3)
    assert found["loads"] == ["model", "optimizer", "extra"]
    section = {"strategy": "fsdp2"}
    config = {"actor_rollout_ref": {"actor": section}}
    assert without_weights(config, 1, False, tmp_path / "global_step_1") is None

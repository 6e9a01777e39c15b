# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The main run learns the built-in task, and learns nothing where there is nothing to learn. Long: `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, FinishedRun, run_main

LONG_RUN_S = 1800


def tiny_cpu(tmp_path: Path, ray_dir: Path, *overrides: str) -> FinishedRun:
    run = run_main(
        FULLY_ASYNC,
        [
            "preset=tiny_cpu",
            f"trainer.default_local_dir={tmp_path}",
            f"hydra.run.dir={tmp_path}/hydra",
            f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
            *overrides,
        ],
        tmp_path,
        timeout_s=LONG_RUN_S,
    )
    assert run.returncode == 0, run.output[-8000:]
    return run


def gain(run: FinishedRun) -> float:
    validation = run.summary["validation"]
    return validation["last"] - validation["first"]


@pytest.mark.e2e
@pytest.mark.slow
def test_preset_learns_the_builtin_task(tmp_path: Path, ray_dir: Path) -> None:
    summary = tiny_cpu(tmp_path, ray_dir).summary
    assert summary["validation"]["first"] <= 0.5
    assert summary["validation"]["last"] >= 0.9
    assert summary["first_step_seconds"] <= 180
    assert summary["peak_memory_gib"] <= 12
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"] == 1


@pytest.mark.e2e
@pytest.mark.slow
def test_learning_rate_zero_gains_nothing(tmp_path: Path, ray_dir: Path) -> None:
    assert abs(gain(tiny_cpu(tmp_path, ray_dir, "actor_rollout_ref.actor.optim.lr=0"))) <= 0.1


@pytest.mark.e2e
@pytest.mark.slow
def test_permuted_rewards_gain_nothing(tmp_path: Path, ray_dir: Path) -> None:
    assert gain(tiny_cpu(tmp_path, ray_dir, "builtin_task.permute_rewards=true")) <= 0.1

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
"""A run whose answers are scored by running them: slow rewards in processes, hidden behind generation and training."""

from __future__ import annotations

from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, run_main, small

from recipe.async_engine.rewards import programs
from recipe.async_engine.rewards.example_task import write
from recipe.async_engine.task import TaskPaths

STEPS = 3


@pytest.mark.e2e
def test_programs_are_scored_in_processes_beside_generation(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    train, val = write(tmp_path / "data", train_size=64, val_size=8, seed=0)
    overrides = [
        *small(task, tmp_path / "run", ray_dir),
        f"data.train_files={train}",
        f"data.val_files={val}",
        "data.max_prompt_length=256",
        "actor_rollout_ref.rollout.max_model_len=288",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        f"reward.custom_reward_function.path={programs.__file__}",
        "+reward.custom_reward_function.reward_kwargs={limits: {wall_s: 20, cpu_s: 2}, max_tests: 2}",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main(FULLY_ASYNC, overrides, tmp_path / "run")
    assert run.returncode == 0, run.output[-8000:]
    assert run.summary["ledger"]["trained"] == STEPS * 4
    assert run.summary["ledger"]["failed"] == 0
    last = run.metrics[-1]
    assert last["fully_async/rewards/scored"] >= 16
    assert last["fully_async/rewards/timed_out"] == last["fully_async/rewards/died"] == 0
    assert last["fully_async/rewards/seconds"] > 0
    assert 0 <= last["fully_async/rewards/hidden_share"] <= 1
    # The tiny model writes no Python: the path is what is shown here.
    assert set(run.column("critic/score/max")) == {0.0}

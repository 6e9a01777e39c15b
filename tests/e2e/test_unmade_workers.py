# SPDX-License-Identifier: Apache-2.0
"""A file of the user that cannot be loaded where it is needed ends the start with its own error, name and place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from main_runs import FULLY_ASYNC, run_main, small

from recipe.laptop.task import TaskPaths

MISSING = "# The package of the line below is missing.\nimport not_installed_here\n"
# What the check before the start looks for in the file, without running it.
DEFINES = "\n\ndef compute_score(**arguments):\n    return 1.0\n\n\nclass Own:\n    pass\n"
MISSED = ("No module named 'not_installed_here'", "user_file.py", "2")
EXITS = "import sys\nsys.exit('set JUDGE_KEY first')\n"
POSTPONED = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Judged:\n    x: int\n"
)
ROLLOUT = "actor_rollout_ref.rollout"
REWARD = "reward.custom_reward_function.path={file}"

CASES = {
    "reward": (MISSING, [REWARD], MISSED),
    "reward that exits": (EXITS, [REWARD], ("SystemExit: set JUDGE_KEY first", "user_file.py", "2")),
    "reward with postponed annotations": (POSTPONED, [REWARD], ("leave out `from __future__ import annotations`",)),
    "tools": (MISSING, [f"{ROLLOUT}.multi_turn.function_tool_path={{file}}"], MISSED),
    "agent loop": (
        MISSING,
        [f"{ROLLOUT}.agent.agent_loop_config_path={{loops}}", f"{ROLLOUT}.agent.default_agent_loop=own"],
        MISSED,
    ),
    "data set": (MISSING, ["data.custom_cls.path={file}", "data.custom_cls.name=Own"], MISSED),
    "external library": (MISSING, ["actor_rollout_ref.model.external_lib=user_file"], MISSED),
}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_start_ends_with_the_error_of_the_users_file(
    case: str, task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, overrides, words = CASES[case]
    file, loops = tmp_path / "user_file.py", tmp_path / "loops.yaml"
    file.write_text(text + DEFINES)
    loops.write_text("- name: own\n  _target_: user_file.Own\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = [override.format(file=file, loops=loops) for override in overrides]
    run = run_main(FULLY_ASYNC, [*small(task, tmp_path / "run", ray_dir), *asked], tmp_path / "run", shared=False)
    assert run.returncode == 1
    message = run.summary["error"]["message"]
    missing = [word for word in words if word not in message]
    assert not missing, (missing, message)
    assert run.summary["steps"] == 0
    sys.stdout.write(f"{run.summary['error']['name']}: {message}\n")

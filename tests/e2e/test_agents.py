# SPDX-License-Identifier: Apache-2.0
"""An agent that knows only OpenAI's client, in a real run: what is trained is what the engines sampled.

And the commands of docs/agents.md, word for word.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_record import Sampled, sampled_by_engines, trained_tokens
from main_process import last_words
from main_runs import FinishedRun, decode_steps, run_main, small, trained_answers
from surroundings import CHECKOUT, user_environment
from test_fully_async import check_books

from recipe.laptop.task import TaskPaths

ROLLOUT = "actor_rollout_ref.rollout"
STEPS = 8


def trained_agent(
    agent: str, task: TaskPaths, folder: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[FinishedRun, list[dict[str, Any]], Sampled]:
    """Train a function of `openai_agent`; return the run, what it trained, and what its engines sampled."""
    record, samples = folder / "answers", folder / "samples"
    samples.mkdir()
    monkeypatch.setenv("RECORD_FOLDER", str(record))
    monkeypatch.setenv("ENGINE_SAMPLES", str(samples))
    decode_steps(monkeypatch, 0.08)
    loops = folder / "agent_loops.yaml"
    loops.write_text(f"- name: agent\n  _target_: openai_agent.AgentLoop\n  agent: openai_agent.{agent}\n")
    overrides = [
        *small(task, folder / "run", ray_dir),
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=recorded_samples.RecordedSamples",
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        f"{ROLLOUT}.agent.default_agent_loop=agent",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main("fully_async:recording_trainer.RecordingTrainer", overrides, folder / "run")
    check_books(run, STEPS, bound=4)
    return run, trained_answers(record), sampled_by_engines(samples)


@pytest.mark.e2e
@pytest.mark.slow
def test_an_agent_is_trained_on_what_the_engines_sampled_under_interruptions(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, answers, sampled_by_its_engines = trained_agent("run", task, tmp_path, ray_dir, monkeypatch)
    assert sum(run.column("fully_async/partial/interrupted_trajectories")) > 0
    assert set(run.column("agents/unmatched_share")) == {0.0}

    assert len(answers) == STEPS * 16
    for answer in answers:
        sampled = [version for version in answer["versions"] if version >= 0]
        assert 12 <= len(sampled) <= 24 and len(sampled) < len(answer["tokens"])
    assert not trained_tokens(answers) - sampled_by_its_engines


@pytest.mark.e2e
@pytest.mark.slow
def test_an_agent_that_branches_and_rewrites_its_history_is_trained_once_on_what_was_sampled(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, answers, sampled_by_its_engines = trained_agent("rewriting", task, tmp_path, ray_dir, monkeypatch)

    trained = trained_tokens(answers)
    # Four answers of six tokens to each of the 16 prompts of a step.
    assert trained.total() == STEPS * 16 * 4 * 6
    assert not trained - sampled_by_its_engines


@pytest.mark.e2e
@pytest.mark.slow
def test_the_commands_of_the_page_show_an_agent_and_train_it(tmp_path: Path) -> None:
    commands = re.findall(r"```bash\n(.*?)```", (CHECKOUT / "docs" / "agents.md").read_text(), re.DOTALL)
    environment = user_environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    (tmp_path / "examples").symlink_to(CHECKOUT / "examples")
    finished = subprocess.run(
        ["bash", "-ec", "\n".join(commands)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, last_words(finished)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "trajectories.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        sampled = len(line["response_mask"])
        assert line["response_mask"] == [1] * sampled
        assert len(line["response_ids"]) == len(line["response_logprobs"]) == sampled
        assert max(line["response_logprobs"]) < 0 and line["reward_score"] in (0.0, 1.0)
    summary = json.loads((tmp_path / "runs" / "agent" / "summary.json").read_text())
    assert (summary["steps"], summary["error"]) == (10, None)

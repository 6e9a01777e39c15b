# SPDX-License-Identifier: Apache-2.0
"""Agents of well-known libraries, killed while they train, and resumed, in two modes.

The libraries' own loops run unchanged, as functions in the agent-loop worker. Each trained token is one that an engine
has sampled, with the version of the weights that it had, by the engine's own record. And the same with an agent loop
that returns lists of outputs. The libraries are in a folder of their own; without it their tests are skipped.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from drilled_run import check_books, committed_steps, drilled
from engine_record import sampled_by_engines, trained_tokens
from main_runs import FinishedRun, decode_steps, run_main, small, trained_answers
from splitting_loop import count_of, lists, trajectories_of

from recipe.laptop.task import TaskPaths

ROLLOUT = "actor_rollout_ref.rollout"
GROUPS, BOUND = 4, 4
LIBRARIES = [
    pytest.param(
        f"trained_libraries.{name}",
        marks=pytest.mark.skipif(not Path(sys.prefix, "agents").exists(), reason="requirements/agents.txt is missing"),
        id=name,
    )
    for name in ("openai_agents", "pydantic_ai", "langgraph", "smolagents")
]
CLIENT = pytest.param("openai_agent.run", id="openai")


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders for what the trainer and the engines write of a run in ``tmp_path``."""
    (tmp_path / "samples").mkdir()
    monkeypatch.setenv("RECORD_FOLDER", str(tmp_path / "answers"))
    monkeypatch.setenv("ENGINE_SAMPLES", str(tmp_path / "samples"))
    decode_steps(monkeypatch, 0.08)


def agent_run(agent: str, task: TaskPaths, folder: Path, ray_dir: Path) -> list[str]:
    """Overrides for a run whose conversations have some hundred tokens."""
    loops = folder / "agent_loops.yaml"
    module, _, _ = agent.partition(".")
    loops.write_text(f"- {{name: agent, _target_: {module}.AgentLoop, agent: {agent}, overlong_reward: 0}}\n")
    return [
        *small(task, folder / "run", ray_dir),
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=recorded_samples.RecordedSamples",
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        f"{ROLLOUT}.agent.default_agent_loop=agent",
        "data.max_prompt_length=64",
        "data.max_response_length=400",
        f"{ROLLOUT}.max_model_len=512",
        f"{ROLLOUT}.max_num_seqs=8",
        f"async_training.max_staleness={BOUND}",
        "trainer.save_freq=1",
    ]


def keeps_answers(folder: Path) -> bool:
    """Return whether the newest checkpoint has answers of trajectories that were not finished."""
    if not (steps := committed_steps(folder)):
        return False
    state = torch.load(folder / f"global_step_{max(steps)}" / "rollout_state.pt", weights_only=False)
    records = [record for group in state["groups"].values() for record in group["kept"]]
    return any(record is not None and pickle.loads(record.answers) for record in records)


def two_lives(mode: str, overrides: list[str], folder: Path) -> FinishedRun:
    """Train until SIGKILL after a checkpoint with unfinished answers, and then to the end; return the second life."""
    main = f"{mode}:recording_trainer.RecordingTrainer"
    with drilled(main, [*overrides, "trainer.total_training_steps=1000"], folder / "run") as run:
        run.wait_for(lambda: keeps_answers(run.folder), "a checkpoint with unfinished answers")
        run.kill()
    steps = max(committed_steps(folder / "run")) + 3
    second = run_main(main, [*overrides, f"trainer.total_training_steps={steps}"], folder / "run")
    assert second.returncode == 0, second.output[-8000:]
    return second


def check_lives(run: FinishedRun, folder: Path) -> list[dict[str, Any]]:
    """Check what holds for every run here, and return the trained answers."""
    steps = run.summary["steps"]
    check_books(run, steps * GROUPS)
    assert run.summary["ledger"] == {
        "issued": steps * GROUPS,
        "trained": steps * GROUPS,
        "filtered": 0,
        "failed": 0,
        "live": 0,
    }
    assert run.summary["staleness"]["max"] <= BOUND
    assert set(run.column("fully_async/partial/inexact_version_ratio")) == {0}
    # Work of the killed life went on: nothing of it was lost, and nothing was sampled again.
    assert run.column("fully_async/partial/restored_tokens")[-1] > 0
    tokens = run.rollout_state()["interrupted_tokens"]
    assert (tokens["cut"], tokens["lost"], tokens["cached"]) == (tokens["trained"], 0, 0)
    answers = trained_answers(folder / "answers")
    assert Counter(answer["step"] for answer in answers).keys() == set(range(1, steps + 1))
    trained, sampled = trained_tokens(answers), sampled_by_engines(folder / "samples")
    assert trained.total() > 0 and not trained - sampled
    assert max(len({version for version in answer["versions"] if version >= 0}) for answer in answers) > 1
    return answers


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fully_async", "partial_rollout"])
@pytest.mark.parametrize("agent", [CLIENT, *LIBRARIES])
def test_an_agent_killed_while_it_trains_goes_on_and_is_trained_on_what_the_engines_sampled(
    agent: str, mode: str, task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    run = two_lives(mode, agent_run(agent, task, tmp_path, ray_dir), tmp_path)
    answers = check_lives(run, tmp_path)
    assert sum(run.column("fully_async/partial/interrupted_trajectories")) > 0
    # A tool's words between the policy's.
    assert any(-1 in answer["versions"] for answer in answers)


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_lists_of_outputs_killed_while_they_train_are_trained_as_the_engines_sampled_them(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    overrides = [
        *small(task, tmp_path / "run", ray_dir),
        *lists(task, tmp_path),
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=recorded_samples.RecordedSamples",
        "data.shuffle=false",
        "data.max_prompt_length=64",
        # The rewards are all zero, but each version needs weights of its own to be told by.
        "actor_rollout_ref.actor.entropy_coeff=0.1",
        f"async_training.max_staleness={BOUND}",
        "trainer.save_freq=1",
    ]
    answers = check_lives(two_lives("fully_async", overrides, tmp_path), tmp_path)
    rows = Counter(answer["uid"] for answer in answers)
    for uid, count in rows.items():
        index = int(uid.rpartition("-")[2])
        assert count == sum(count_of(index, session) for session in range(trajectories_of(index)))
    assert max(rows.values()) == 9

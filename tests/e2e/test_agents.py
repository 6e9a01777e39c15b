# SPDX-License-Identifier: Apache-2.0
"""An agent that knows only OpenAI's client, in a real run: what is trained is what the engines sampled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from main_runs import decode_steps, run_main, small, trained_answers
from test_fully_async import check_books

from recipe.laptop.task import TaskPaths

ROLLOUT = "actor_rollout_ref.rollout"
STEPS = 5


def sampled_sequences(folder: Path) -> Counter[tuple[int, ...]]:
    """Each token that an engine sampled, with all tokens before it."""
    found: Counter[tuple[int, ...]] = Counter()
    for file in folder.iterdir():
        sequences: dict[str, list[int]] = {}
        for line in file.read_text().splitlines():
            what, request, tokens = json.loads(line)
            if what == "asked":
                sequences[request] = tokens
                continue
            for token in tokens:
                sequences[request].append(token)
                found[tuple(sequences[request])] += 1
    return found


@pytest.mark.e2e
@pytest.mark.slow
def test_an_agent_is_trained_on_what_the_engines_sampled_under_interruptions(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, samples = tmp_path / "answers", tmp_path / "samples"
    samples.mkdir()
    monkeypatch.setenv("RECORD_FOLDER", str(record))
    monkeypatch.setenv("ENGINE_SAMPLES", str(samples))
    decode_steps(monkeypatch, 0.08)
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text("- name: agent\n  _target_: openai_agent.AgentLoop\n  agent: openai_agent.run\n")
    overrides = [
        *small(task, tmp_path / "run", ray_dir),
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=recorded_samples.RecordedSamples",
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        f"{ROLLOUT}.agent.default_agent_loop=agent",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = run_main("fully_async:recording_trainer.RecordingTrainer", overrides, tmp_path / "run")
    check_books(run, STEPS, bound=4)
    assert sum(run.column("fully_async/partial/interrupted_trajectories")) > 0
    assert set(run.column("agents/unmatched_share")) == {0.0}

    answers = trained_answers(record)
    assert len(answers) == STEPS * 16
    trained: Counter[tuple[int, ...]] = Counter()
    for answer in answers:
        sequence = answer["prompt"] + answer["tokens"]
        sampled = [place for place, version in enumerate(answer["versions"]) if version >= 0]
        assert len(sampled) == 24 < len(answer["tokens"])
        trained.update(tuple(sequence[: len(answer["prompt"]) + place + 1]) for place in sampled)
    assert not trained - sampled_sequences(samples)

# SPDX-License-Identifier: Apache-2.0
"""A run whose agents are processes of a worker elsewhere: it is trained on what its engines sampled for them."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engine_record import sampled_by_engines, trained_tokens
from main_runs import decode_steps, run_main, small, trained_answers
from test_fully_async import check_books

from recipe.agents.runner import KEY
from recipe.laptop.task import TaskPaths

ROLLOUT = "actor_rollout_ref.rollout"
STEPS = 3
PROGRAM = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 8}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = json.load(open(os.environ["AGENT_ROW"]))["raw_prompt"]
said = ask(messages)
said = ask([*messages, said, {"role": "user", "content": "12"}])
print(json.dumps({"reward": float(sum(letter.isdigit() for letter in said["content"])), "worker": os.getppid()}))
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_agents_on_another_host_are_trained_on_what_the_engines_sampled(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, samples = tmp_path / "answers", tmp_path / "samples"
    samples.mkdir()
    monkeypatch.setenv("RECORD_FOLDER", str(record))
    monkeypatch.setenv("ENGINE_SAMPLES", str(samples))
    decode_steps(monkeypatch, 0.02)
    monkeypatch.setenv(KEY, "a key for the run and the host")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text(f"- name: agent\n  _target_: recipe.agents.loop.OpenAIAgentLoop\n  hosts: {address}\n")
    overrides = [
        *small(task, tmp_path / "run", ray_dir),
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=recorded_samples.RecordedSamples",
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        f"{ROLLOUT}.agent.default_agent_loop=agent",
        f"trainer.total_training_steps={STEPS}",
    ]
    # The worker waits for the run, as it would after a restart.
    program = shlex.join([sys.executable, "-I", "-S", "-c", PROGRAM])
    worker = subprocess.Popen(
        [sys.executable, "-m", "recipe.agents.worker", "--connect", f"http://{address}", "--command", program],
        env={**os.environ, "MARK": str(tmp_path)},
    )
    try:
        run = run_main("fully_async:recording_trainer.RecordingTrainer", overrides, tmp_path / "run")
    finally:
        worker.terminate()
        assert worker.wait(30) == 0
    check_books(run, STEPS, bound=4)
    assert set(run.column("agents/unmatched_share")) == {0.0}
    answers = trained_answers(record)
    assert len(answers) == STEPS * 16
    trained = trained_tokens(answers)
    assert trained and not trained - sampled_by_engines(samples)
    assert not [each for each in psutil.process_iter() if "AGENT_ROW" in "".join(each.cmdline())]

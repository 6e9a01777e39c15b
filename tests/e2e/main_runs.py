# SPDX-License-Identifier: Apache-2.0
"""Runs a main of this package like a user: in a subprocess with its own Ray and its own folder."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import check_if_recorded
from main_process import run_module, short_run
from metric_names import missing, undocumented
from surroundings import shared_forks, user_environment, with_helpers

from benchmarks.emulation.devices import Emulation
from recipe.laptop.task import TaskPaths

FULLY_ASYNC = "recipe.fully_async.main"
ONE_STEP_OFF = "recipe.one_step_off.main"
RUN_S = 480
ENGINE = os.environ.get("E2E_ENGINE", "vllm")
"""The rollout engine of the runs; `make test-all` runs the tests that name none with SGLang too."""
EMULATED = "benchmarks.emulation.engine.EmulatedExtension"
RAY_FOLDER = "+ray_kwargs.ray_init._temp_dir"


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: how it ended and what it left."""

    returncode: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def column(self, key: str) -> list[float]:
        return [step[key] for step in self.metrics]

    def rollout_state(self) -> dict[str, Any]:
        """Return the rollout part of the newest checkpoint."""
        step = (self.folder / "latest_checkpointed_iteration.txt").read_text().strip()
        return torch.load(self.folder / f"global_step_{step}" / "rollout_state.pt", weights_only=False)


def trained_answers(folder: Path) -> list[dict[str, Any]]:
    """Return all answers that a trainer of `recording_trainer` has recorded, in step order, each with its step."""
    found = []
    for file in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        found += [json.loads(line) | {"step": int(file.stem)} for line in file.read_text().splitlines()]
    return found


def small(task: TaskPaths, folder: Path, ray_dir: Path) -> list[str]:
    """Return overrides of ``preset=tiny_cpu`` for a run of a few steps of 4 groups of 4 answers."""
    return [
        "preset=tiny_cpu",
        f"actor_rollout_ref.rollout.name={ENGINE}",
        *short_run(task, folder, ray_dir),
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        # With so few steps and such a small model, equal answers are normal and must not count as an alarm.
        "async_training.alarms.exit_status=false",
    ]


def decode_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Make the engine steps of `EMULATED` engines take this long, without using a core."""
    for name, value in Emulation(decode_step_s=seconds).environment().items():
        monkeypatch.setenv(name, value)


def long_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loop: str = "losing.LongAnswers", extension: str = EMULATED
) -> list[str]:
    """Return overrides for answers of 24 tokens, or of another agent loop, with decode steps of 0.08 s."""
    decode_steps(monkeypatch, 0.08)
    loops = folder / "agent_loops.yaml"
    loops.write_text(f"- name: long\n  _target_: {loop}\n")
    rollout = "actor_rollout_ref.rollout"
    return [
        f"{rollout}.engine_kwargs.vllm.worker_extension_cls={extension}",
        f"{rollout}.agent.agent_loop_config_path={loops}",
        f"{rollout}.agent.default_agent_loop=long",
    ]


def dying_receiver(monkeypatch: pytest.MonkeyPatch, mark: Path, version: int) -> list[str]:
    """Return overrides for a run in which one weight receiver dies in the sync of ``version`` (`faulty_engine`)."""
    monkeypatch.setenv("FAULTY_SYNC_VERSION", str(version))
    monkeypatch.setenv("FAULTY_SYNC_MARK", str(mark))
    checkpoint_engine = "actor_rollout_ref.rollout.checkpoint_engine"
    return [f"{checkpoint_engine}.backend=faulty_gloo", f"{checkpoint_engine}.custom_backend_module=faulty_engine"]


def run_main(
    main: str, overrides: list[str], folder: Path, timeout_s: float = RUN_S, shared: bool = True
) -> FinishedRun:
    """Run ``main`` to its end, and check its account; ``overrides`` may name helpers in this folder.

    Args:
        main: a module, or "mode:trainer": that mode's main with a trainer of a module in this folder.
        shared: whether all its processes are forks of the one that the tests share; otherwise its workers are the run's
            own, as for a user, and must also disappear when they are stopped.
    """
    # The main chooses its platform itself, as in a user's shell.
    module, environment = as_module(main, user_environment())
    environment = with_helpers(environment)
    forks = None
    if shared:
        forks = shared_forks(environment)
        overrides = [*overrides, "async_training.prefork_workers=false"]
    folder.mkdir(parents=True, exist_ok=True)
    finished = run_module(module, overrides, folder, environment, timeout_s, forks)
    (folder / "output.txt").write_text(finished.stdout)
    sys.stdout.write(f"{finished.stdout}\n{trainer_log(overrides)}\n")  # pytest shows it if a test fails
    run = FinishedRun(finished.returncode, finished.stdout, folder)
    check_if_recorded(run)
    check_metrics(run)
    return run


def check_metrics(run: FinishedRun) -> None:
    """Check that docs/metrics.md and the metrics of a run agree."""
    if run.returncode == 0 and (run.folder / "metrics.jsonl").exists() and run.metrics:
        names = {name for step in run.metrics for name in step}
        assert undocumented(names) == [] and missing(names) == []


def as_module(main: str, environment: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the module that ``main`` stands for in `run_main`, and the environment that it needs."""
    if ":" not in main:
        return main, environment
    mode, trainer = main.split(":")
    return "trainer_main", environment | {"MODE": mode, "TRAINER": trainer}


def trainer_log(overrides: list[str]) -> str:
    """Return the log of the trainer's actor of a run."""
    temporary = next((value for key, _, value in (item.partition("=") for item in overrides) if key == RAY_FOLDER), "")
    logs = Path(temporary, "session_latest", "logs").glob("worker-*.err") if temporary else ()
    texts = []
    for path in logs:
        # Ray renames a worker's file when the worker gets work.
        with suppress(FileNotFoundError):
            texts.append(path.read_text(errors="replace"))
    return "\n".join(text for text in texts if ":actor_name:TaskRunner" in text)

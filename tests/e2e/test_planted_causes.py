# SPDX-License-Identifier: Apache-2.0
"""Runs that are slow for a reason that was planted: the advice names it first, and its seconds are in the account.

What was planted is noted by the cause itself (`planting`), in no part of the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from main_runs import EMULATED, decode_steps, run_main, small

from recipe.async_engine.record.events import WEIGHTS, Class
from recipe.async_engine.rollout.trajectory_worker import REWARD_AT_ONCE_S
from recipe.laptop.task import TaskPaths
from recipe.report.run import Run, load

STEPS, ANSWERS = 4, 16
STEP_S = 0.05
WITHIN = 0.03
MAIN = "fully_async:planting.Planting"
IN_VLLM = pytest.mark.vllm("the cause is planted in a worker of vLLM")
BOUND_ZERO = ["async_training.staleness_threshold=0"]
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"

Planted = list[dict[str, Any]]


def total(planted: Planted, what: str) -> float:
    return sum(each["end"] - each["start"] for each in planted if each["what"] == what)


def of_steps(planted: Planted, what: str, which: str) -> list[list[float]]:
    """Of each step, when its answers were at it or done with it, in their order."""
    times = sorted(each[which] for each in planted if each["what"] == what)
    return [times[first : first + ANSWERS] for first in range(0, len(times), ANSWERS)]


def at_once(planted: Planted, what: str) -> float:
    """Seconds of each step in which all its answers were at it."""
    steps = zip(of_steps(planted, what, "start"), of_steps(planted, what, "end"), strict=True)
    return sum(ends[0] - starts[-1] for starts, ends in steps)


def of_rewards(planted: Planted) -> tuple[float, float]:
    """Seconds of each step in which its last reward was computed, and from its last answer to the end of that.

    The scheduler hears of a last token when its reward does not come at once.
    """
    begun, ended, answered = (
        of_steps(planted, what, which) for what, which in (("reward", "start"), ("reward", "end"), ("answered", "end"))
    )
    computed = sum(ends[-1] - starts[-1] - REWARD_AT_ONCE_S for starts, ends in zip(begun, ended, strict=True))
    return computed, sum(ends[-1] - last[-1] for last, ends in zip(answered, ended, strict=True))


@dataclass(frozen=True)
class Cause:
    """What is planted, and what the account must have of it.

    seconds: in the account of a device, and the least and the most that was planted; None where that cannot be said.
    """

    first: Class
    setting: str
    overrides: list[str] = field(default_factory=list)
    loop: str = "ShortAnswers"
    extension: str = EMULATED
    reward: str = "quick_reward"
    environment: dict[str, str] = field(default_factory=dict)
    seconds: Callable[[Run, Planted], tuple[float, ...]] | None = None


def seconds(run: Run, device: str, *classes: Class) -> float:
    return sum(run.account.devices[device].seconds.get(what, 0.0) for what in classes)


def of_tail(run: Run, planted: Planted) -> tuple[float, float]:
    """From its answer on, the place of each of 16 answers is free until the last one; the last step is the end."""
    free = sum(answered[-1] - each for answered in of_steps(planted, "answered", "end")[:-1] for each in answered)
    return seconds(run, "rollout 0", Class.WAIT_TAIL), free / ANSWERS


def of_sync(run: Run, planted: Planted) -> tuple[float, float, float]:
    """The swaps, and what the trainer saw of them: from its call to pause to the end of that to resume."""
    seen = [event for event in run.events if event.lane == WEIGHTS and event.what in ("swap", "resume")]
    paused = sum(event.end - event.start for event in seen)
    return seconds(run, "rollout 0", Class.WAIT_WEIGHTS), total(planted, "swap"), paused


def of_gate(run: Run, planted: Planted) -> tuple[float, float]:
    """From when a batch is taken until the next version generates; after the last batch nothing is held."""
    held = [each["end"] - each["start"] for each in planted if each["what"] == "held"]
    return seconds(run, "rollout 0", Class.WAIT_GATE, Class.WAIT_WEIGHTS), sum(held[:-1])


CAUSES = {
    "a reward of 2 s": Cause(
        Class.WAIT_REWARD,
        "reward_processes",
        BOUND_ZERO,
        reward="slow_reward",
        environment={"PLANTED_S": "2"},
        seconds=lambda run, planted: (seconds(run, "rollout 0", Class.WAIT_REWARD), *of_rewards(planted)),
    ),
    "a sync of 3 s": Cause(
        Class.WAIT_WEIGHTS,
        "trigger_parameter_sync_step 1 -> 2",
        ["async_training.staleness_threshold=1"],
        extension="planting.SlowSwap",
        environment={"PLANTED_S": "3"},
        seconds=of_sync,
    ),
    "a gate that is too tight": Cause(
        Class.WAIT_GATE,
        "max_staleness 0 -> 1",
        BOUND_ZERO,
        environment={"PLANTED_S": "3", "CAUSE": "update", "ANSWER": "30"},
        seconds=of_gate,
    ),
    "a tail": Cause(Class.WAIT_TAIL, "max_staleness 0 -> 1", BOUND_ZERO, loop="TailedAnswers", seconds=of_tail),
    "a slow replica": Cause(
        Class.DECODING,
        "rollout ",
        [*BOUND_ZERO, "rollout.n_gpus_per_node=2"],
        loop="TailedAnswers",
        extension="planting.OneSlowEngine",
    ),
    "a slow tool": Cause(
        Class.WAIT_TOOLS,
        "tools",
        BOUND_ZERO,
        loop="SlowTool",
        environment={"PLANTED_S": "2"},
        seconds=lambda run, planted: (seconds(run, "rollout 0", Class.WAIT_TOOLS), at_once(planted, "tool")),
    ),
    "a slow validation": Cause(
        Class.WAIT_VALIDATION,
        "test_freq",
        ["async_training.staleness_threshold=1", "trainer.test_freq=1"],
        environment={"PLANTED_S": "2", "CAUSE": "validate"},
        seconds=lambda run, planted: (seconds(run, "trainer", Class.WAIT_VALIDATION), total(planted, "validate")),
    ),
    "a slow checkpoint": Cause(
        Class.WAIT_CHECKPOINT,
        "save_freq",
        ["async_training.staleness_threshold=1", "trainer.save_freq=1"],
        environment={"PLANTED_S": "2", "CAUSE": "save"},
        seconds=lambda run, planted: (seconds(run, "trainer", Class.WAIT_CHECKPOINT), total(planted, "save")),
    ),
    "a slow driver": Cause(
        Class.WAIT_DRIVER,
        "require_batches",
        ["async_training.staleness_threshold=1"],
        environment={"PLANTED_S": "2", "CAUSE": "driver"},
    ),
    "slow prompts": Cause(
        Class.WAIT_PROMPTS,
        "dataloader_num_workers",
        ["async_training.staleness_threshold=1", "data.custom_cls.name=SlowPrompts"],
        environment={"PLANTED_S": "0.6"},
    ),
    "slow log-prob servers": Cause(
        Class.WAIT_LOG_PROBS,
        "model_engine_server",
        [*BOUND_ZERO, "model_engine_server=fsdp2", "model_engine_server.max_delay=2"],
    ),
    "too few slots": Cause(
        Class.WAIT_BATCH,
        "concurrent_samples_per_replica 1 -> null",
        ["async_training.staleness_threshold=1", "async_training.concurrent_samples_per_replica=1"],
    ),
}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if cause.extension == EMULATED else IN_VLLM) for name, cause in CAUSES.items()],
)
def test_a_planted_cause_is_named_first_and_its_seconds_are_in_the_account(
    name: str, untrained_task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause, here, planted = CAUSES[name], Path(__file__).parent / "planting.py", tmp_path / "planted.jsonl"
    decode_steps(monkeypatch, STEP_S)
    for key, value in {**cause.environment, "PLANTED": str(planted)}.items():
        monkeypatch.setenv(key, value)
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text(f"- name: planted\n  _target_: planting.{cause.loop}\n")
    overrides = [
        *small(untrained_task, tmp_path, ray_dir),
        "data.shuffle=false",
        "data.max_response_length=128",
        "actor_rollout_ref.rollout.max_model_len=192",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        f"{ENGINE}={cause.extension}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=planted",
        f"reward.custom_reward_function.path={here.with_name('planted.py')}",
        f"reward.custom_reward_function.name={cause.reward}",
        f"trainer.total_training_steps={STEPS}",
        *(f"data.custom_cls.path={here}" for setting in cause.overrides if setting.startswith("data.custom_cls")),
        *cause.overrides,
    ]
    finished = run_main(MAIN, overrides, tmp_path)
    assert finished.returncode == 0, finished.output[-8000:]
    run = load(tmp_path)
    first = run.advice[0]
    shown = [(advice.what.value, round(advice.seconds, 2)) for advice in run.advice]
    assert first.what is cause.first, (shown, run.account.summary())
    assert cause.setting in first.change
    if name == "a slow replica":
        assert first.device is not None
    if cause.seconds is not None:
        notes = [json.loads(line) for line in planted.read_text().splitlines()]
        accounted, *truth = cause.seconds(run, notes)
        assert (1 - WITHIN) * min(truth) <= accounted <= (1 + WITHIN) * max(truth), (shown, run.account.summary())

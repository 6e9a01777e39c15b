# SPDX-License-Identifier: Apache-2.0
"""One run in several lives: each is harmed from outside, goes on or ends in time, and the next resumes in its folder.

What a life ends with, and within what time, is in the table of docs/reliability.md. The last life ends by itself, and
the books of all of them close.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from drilled_run import CONTINUE, KILL, STOP, DrilledRun, check_books, committed_steps, drilled
from main_runs import FULLY_ASYNC, FinishedRun, run_main, small

from recipe.laptop.task import TaskPaths

logger = logging.getLogger(__name__)

GROUPS = 4
SLACK_S = 60.0
"""What the end of a run may take beyond its deadline."""
STOPPED_S = 5.0
WHILE_STOPPED = 3


@dataclasses.dataclass(frozen=True)
class Fault:
    """A signal that ends a run.

    Attributes:
        part: which process gets it.
        number: the signal.
        cause: a pattern that the run's error has in it.
        deadline_s: of what notices it, by the settings of these tests.
        status: what the main exits with.
        left_s: how long a process may outlive the main.
    """

    part: str
    number: int
    cause: str
    deadline_s: float
    status: int = 1
    left_s: float = 30.0


SETTINGS = ["async_training.timeouts.heartbeat=15", "async_training.timeouts.prompt=15"]
TRAINER_STOPPED = Fault("trainer", STOP, "async_training.timeouts.heartbeat", 15)
MAIN_KILLED = Fault("main", KILL, "", 0, status=-KILL, left_s=90)
CONTROL_KILLED = Fault("control process", KILL, "control process", 40)
CONTROL_STOPPED = Fault("control process", STOP, "control process", 15)
RAYLET_KILLED = Fault("raylet", KILL, "raylet", 0)
RAYLET_STOPPED = Fault("raylet", STOP, "raylet", 30)
# Its watch has a deadline of its own, since no stage of a trainer that waits for it ends.
STALL_S = 20
RANK_STOPPED = Fault("training worker", STOP, r"training worker 0 \(\w+\) DOES NOT ANSWER", STALL_S)
FORK_SERVER_KILLED = Fault("fork server", KILL, "the process that workers are forked from", 30)
LOADER_STOPPED = Fault("loader worker", STOP, "data's loader", 15)
LOADER_KILLED = Fault("loader worker", KILL, "data's loader", 15)


def end_by(run: DrilledRun, fault: Fault) -> FinishedRun | None:
    """How the run ended, in time and with its cause; None if its main was killed and could say nothing."""
    began = time.monotonic()
    run.signal(fault.part, fault.number)
    finished = run.end_within(fault.deadline_s + SLACK_S, fault.left_s)
    logger.info("%s: %.0f s from the signal to the end", fault, time.monotonic() - began)
    assert finished.returncode == fault.status, f"{fault} after {time.monotonic() - began:.0f} s: {finished.returncode}"
    if fault.status < 0:
        assert not (run.folder / "summary.json").exists()
        return None
    error = finished.summary["error"]
    said = f"{error['name']}: {error['message']}"
    assert re.search(fault.cause, said), said
    assert said.splitlines()[0] in finished.output
    return finished


def live(
    overrides: list[str], folder: Path, fault: Fault, meanwhile: Callable[[DrilledRun], None] | None = None
) -> FinishedRun | None:
    """One life of a run, to the end that ``fault`` makes of it; ``meanwhile`` is done to it before."""
    with drilled(FULLY_ASYNC, [*overrides, "trainer.total_training_steps=1000"], folder) as run:
        run.wait_for_steps(3)
        if meanwhile is not None:
            meanwhile(run)
        return end_by(run, fault)


def finish(overrides: list[str], folder: Path) -> FinishedRun:
    """The last life, two steps beyond the newest checkpoint."""
    steps = newest_step(folder) + 2
    with drilled(FULLY_ASYNC, [*overrides, f"trainer.total_training_steps={steps}"], folder) as run:
        finished = run.end_within(300)
    assert finished.returncode == 0
    check_books(finished, steps * GROUPS)
    return finished


def newest_step(folder: Path) -> int:
    return max(committed_steps(folder))


def stop_main_for_a_moment(run: DrilledRun) -> None:
    """While it is stopped it can take in nothing; then it takes in what the trainer has done since."""
    run.signal("main", STOP)
    time.sleep(STOPPED_S)
    run.signal("main", CONTINUE)
    run.wait_for_steps(WHILE_STOPPED)


def start_a_second_run_there(run: DrilledRun) -> None:
    """It says who is there and ends; the first one goes on, and is not touched."""
    second = run_main(FULLY_ASYNC, run.overrides, run.folder.parent / "second", timeout_s=2 * SLACK_S)
    assert second.returncode == 1
    assert str(run.process.pid) in second.output
    assert "Traceback" not in second.output
    run.wait_for_steps(2)


def damage_newest_checkpoint(folder: Path) -> int:
    """A shard of the model is gone, as when a folder is copied in part; the step that is left to resume from."""
    step = newest_step(folder)
    shard = next((folder / f"global_step_{step}").rglob("model_world_size_*.pt"))
    shard.unlink()
    return step


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_stopped_trainer_lost_control_process_and_killed_main_end_a_run_that_goes_on_from_its_checkpoints(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    folder = tmp_path / "run"
    overrides = [*small(task, folder, ray_dir), "trainer.save_freq=1", *SETTINGS]

    def disturb(run: DrilledRun) -> None:
        stop_main_for_a_moment(run)
        start_a_second_run_there(run)

    live(overrides, folder, TRAINER_STOPPED, disturb)
    damaged = damage_newest_checkpoint(folder)
    second = live(overrides, folder, CONTROL_KILLED)
    assert second is not None
    assert second.summary["resumed"]["step"] == damaged - 1
    live(overrides, folder, MAIN_KILLED)
    finish(overrides, folder)


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([CONTROL_STOPPED, RAYLET_STOPPED, RAYLET_KILLED, RANK_STOPPED], id="Ray and a training worker"),
        pytest.param([FORK_SERVER_KILLED, LOADER_STOPPED, LOADER_KILLED], id="fork server and data loader"),
    ],
)
def test_run_that_loses_what_it_cannot_do_without_ends_in_time_and_goes_on_from_its_checkpoints(
    faults: list[Fault], task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    folder = tmp_path / "run"
    overrides = [
        *small(task, folder, ray_dir),
        *SETTINGS,
        f"async_training.timeouts.stall={STALL_S}",
        "data.dataloader_num_workers=1",
        "trainer.save_freq=1",
    ]
    for fault in faults:
        live(overrides, folder, fault)
    finish(overrides, folder)


SPARE = {
    "reward worker": "fully_async/rewards/worker_restarts",
    "agent-loop worker": "fully_async/count/agent_loop_worker_restarts",
    "rollout server": "fully_async/count/restarts",
}
"""What a run has two of here, and the column that counts those that were started in a lost one's place."""
REPLACED_S = 180.0


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "balancer"),
    [
        pytest.param(STOP, Fault("load balancer", STOP, "load balancer .* DOES NOT ANSWER", 45), id="stopped"),
        pytest.param(KILL, Fault("load balancer", KILL, "load balancer .* died", 20), id="killed"),
    ],
)
def test_run_goes_on_without_one_of_two_and_replaces_it_but_ends_without_the_load_balancer(
    number: int, balancer: Fault, task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    folder = tmp_path / "run"
    timeouts = {"agent_worker": 15, "reward": 10, "weight_sync": 15, "stall": 45}
    overrides = [
        *small(task, folder, ray_dir),
        *(f"async_training.timeouts.{name}={seconds}" for name, seconds in timeouts.items()),
        "trainer.save_freq=10",
        "rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "reward.num_workers=2",
    ]
    with drilled(FULLY_ASYNC, [*overrides, "trainer.total_training_steps=100000"], folder) as run:
        run.wait_for_steps(3)
        for part, restarts in SPARE.items():
            began = time.monotonic()
            lost = run.signal(part, number)
            run.wait_for(lambda counted=restarts: run.steps()[-1][counted] == 1, f"another {part}", REPLACED_S)
            logger.info("%s %s: replaced after %.0f s", part, lost.pid, time.monotonic() - began)
            run.wait_for_steps(3)
        run.wait_for(lambda: run.steps()[-1]["fully_async/count/live_replicas"] == 2, "two replicas", REPLACED_S)
        run.wait_for(lambda: committed_steps(folder), "a checkpoint")
        end_by(run, balancer)
    finish(overrides, folder)

# SPDX-License-Identifier: Apache-2.0
"""A run on two hosts whose clocks differ: what it records of both fits together, and no wait is by the other clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from drilled_run import drilled
from main_runs import FULLY_ASYNC, small
from ray_nodes import OtherClocks, closing

from recipe.async_engine.record.event_file import events_of, files, read
from recipe.async_engine.record.events import WEIGHTS, Class, Event
from recipe.laptop.task import TaskPaths
from recipe.report.__main__ import main

STEPS = 12
EXCHANGE_S = 0.25
"""The most by which times of two clocks are apart in the record: half the round trip of a question to an engine."""
END_S = 540.0


@pytest.mark.e2e
@pytest.mark.slow
def test_record_of_two_hosts_is_on_one_clock(task: TaskPaths, tmp_path: Path, ray_dir: Path) -> None:
    folder = tmp_path / "run"
    with closing(OtherClocks(ray_dir)) as nodes:
        near, far = nodes.add(accelerators=2), nodes.add(accelerators=1)
        overrides = [
            *(item for item in small(task, folder, ray_dir) if "_temp_dir" not in item),
            # So its ranks leave the other node to the engine.
            "trainer.n_gpus_per_node=2",
            # Forks would be of the main, and have its clocks.
            "async_training.prefork_workers=false",
            f"trainer.total_training_steps={STEPS}",
        ]
        with drilled(FULLY_ASYNC, overrides, folder, before=["env", f"RAY_ADDRESS={nodes.ray_address}"]) as run:
            run.wait_for(lambda: len(run.steps()) >= 1, "a step", timeout_s=END_S)
            assert near.processes("trainer") and far.processes("rollout server")
            ended = run.end_within(END_S)
    # Its account closes, with hardly a second that is not known: `drilled` has checked it.
    assert ended.returncode == 0, ended.output[-3000:]
    table = read(files(folder)[-1]).events
    events = list(events_of(table))
    assert min(event.start for event in events) >= 0
    assert max(event.end for event in events) <= ended.summary["account"]["duration"] + EXCHANGE_S
    # The trainer says when it swapped weights, the engine when it stood still for them.
    swaps = [event for event in events if event.lane == WEIGHTS and event.what == "swap" and event.version]
    paused = [event for event in events if event.lane == "rollout 0" and event.what == Class.WAIT_WEIGHTS]
    assert len(swaps) == STEPS
    for swap in swaps[:-1]:
        assert any(meet(swap, pause) for pause in paused), (swap, paused)
    assert main([str(folder)]) == 0


def meet(first: Event, second: Event) -> bool:
    return first.start - EXCHANGE_S <= second.end and second.start <= first.end + EXCHANGE_S

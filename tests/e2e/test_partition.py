# SPDX-License-Identifier: Apache-2.0
"""The network between two nodes is cut: the run ends in time and says what it has lost.

Each node has a network namespace of its own. The main, the trainer and Ray's control process are on one of them; of the
training worker and the rollout server one is on the other.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from drilled_run import TITLES, drilled, title, wait_for
from main_runs import FULLY_ASYNC, small
from surroundings import user_environment

from recipe.async_engine.task import TaskPaths

logger = logging.getLogger(__name__)

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 6379
UP_S, KILL_S = 60.0, 30.0
SILENT_S = 65.0
"""Until Ray's control process gives a silent node up: five health checks of 10 s, and 3 s between two."""
SLACK_S = 60.0


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network namespaces here: ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: their names, which are those of its ends too."""
    names = (f"drl{os.getpid()}a", f"drl{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class Node:
    """A Ray node with one logical accelerator in a network namespace.

    Attributes:
        known: its processes as far as they were seen; when a parent has died they can't be found any more.
    """

    def __init__(self, space: str, arguments: list[str]) -> None:
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
        resources = ["--num-cpus=20", "--num-gpus=1", "--object-store-memory=300000000"]
        environment = user_environment() | {"VERL_PLATFORM": "cpu", "RAY_AUTH_MODE": "disabled"}
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", space, *command, *arguments, *resources], env=environment
        )
        self.known = {psutil.Process(self.process.pid)}

    def has(self, part: str) -> bool:
        self.look()
        return any(TITLES[part] in title(process).partition(" ")[0] for process in self.known)

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.known |= set(psutil.Process(self.process.pid).children(recursive=True))

    def kill(self) -> None:
        self.look()
        for process in self.known:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(KILL_S)


@contextmanager
def node(space: str, *arguments: str) -> Iterator[Node]:
    """It is over, with all its processes, at the end."""
    started = Node(space, list(arguments))
    try:
        yield started
    finally:
        started.kill()


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_run_whose_nodes_cannot_reach_each_other_ends_in_time(
    spaces: tuple[str, str], task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    folder = tmp_path / "run"
    address = f"{ADDRESSES[0]}:{PORT}"
    head = ["--head", "--include-dashboard=false", f"--node-ip-address={ADDRESSES[0]}", f"--port={PORT}"]
    overrides = [
        *(item for item in small(task, folder, ray_dir) if "_temp_dir" not in item),
        f"ray_kwargs.ray_init.address={address}",
        "trainer.total_training_steps=100000",
        "async_training.timeouts.heartbeat=15",
    ]
    with (
        node(spaces[0], *head, f"--temp-dir={ray_dir}") as near,
        node(spaces[1], f"--address={address}", f"--node-ip-address={ADDRESSES[1]}") as far,
    ):
        wait_for(lambda: far.has("raylet"), UP_S, "a second node")
        with drilled(FULLY_ASYNC, overrides, folder, before=["ip", "netns", "exec", spaces[0]]) as run:
            run.wait_for(lambda: len(run.steps()) >= 3, "three steps", timeout_s=540)
            assert near.has("trainer")
            lost = [part for part in ("training worker", "rollout server") if far.has(part)]
            began = time.monotonic()
            ip("-n", spaces[1], "link", "set", spaces[1], "down")
            status = run.process.wait(SILENT_S + SLACK_S)
            logger.info("%s cut off: %.0f s to the end", lost, time.monotonic() - began)
            said = run.said()
    assert status == 1, said[-3000:]
    assert lost
    last = next(line for line in reversed(said.splitlines()) if "RunFailed: " in line)
    logger.info("%s", last)
    assert "PartLost: " in last or "NoReplicaLeft: " in last, last

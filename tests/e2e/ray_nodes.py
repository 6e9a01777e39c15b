# SPDX-License-Identifier: Apache-2.0
"""Clusters of several Ray nodes on one machine, for tests: nodes are added, killed and cut off like hosts.

Each node has an address of its own in 127.0.0.0/8 (`Loopback`). They are one host to whoever looks, so Ray's processes
may be forks of the one that the tests share, and a run's too.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from drilled_run import TITLES, title, wait_for
from surroundings import shared_forks, user_environment, usual_environment, with_helpers

UP_S, END_S = 60.0, 30.0
CPUS = 20
QUICK = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}


class RayNode:
    """A Ray node: `ray start --block` in a process group of its own.

    Args:
        before: of the command, where it is to run in namespaces.
        forked: whether Ray's processes are forks, which serve a cluster's first job only.

    Attributes:
        known: its processes as far as they were seen; when a parent has died they can't be found any more.
    """

    def __init__(
        self, address: str, before: list[str], arguments: list[str], environment: dict[str, str], forked: bool
    ) -> None:
        self.address = address
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
        self._root = Path(environment["RAY_TMPDIR"], f"{address}.pid")
        if forked:
            forks = str(shared_forks(usual_environment()))
            ray = [forks, "-m", "forked_ray", forks, str(self._root)]
        command = [*before, *ray, "start", "--block", f"--node-ip-address={address}", *arguments]
        self._log = self._root.with_suffix(".log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        if not forked:
            self._root.write_text(str(self.process.pid))
        self.known = {psutil.Process(self.process.pid)}

    def look(self) -> None:
        if self._root.exists() and (pid := self._root.read_text()):
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(int(pid))
                self.known |= {root, *root.children(recursive=True)}

    @property
    def is_up(self) -> bool:
        """Whether it has joined its cluster."""
        assert self.process.poll() is None, self._log.read_text()
        return "Ray runtime started" in self._log.read_text()

    def processes(self, part: str) -> list[psutil.Process]:
        """Those that are ``part``; what is a fork of another process is not among them."""
        self.look()
        return [process for process in self.known if TITLES[part] in title(process).partition(" ")[0]]

    def kill(self) -> None:
        """All its processes at once, as a host that loses its power."""
        self.look()
        for process in self.known:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(END_S)


class Nodes:
    """A cluster without an accelerator, whose first node has Ray's control process.

    Args:
        folder: of Ray's files; its path must be short.
        forked: whether Ray's processes may be forks, which serve a cluster's first job only.
        dashboard: with a dashboard, and its server of jobs, at `dashboard_address`.
    """

    def __init__(self, folder: Path, forked: bool = True, dashboard: bool = False) -> None:
        self.folder, self.forked, self._dashboard = folder, forked, dashboard
        self.nodes: list[RayNode] = []
        # Where Ray notes that this machine has a cluster, for everyone who starts a run meanwhile to join.
        (folder / "ray").mkdir(exist_ok=True)
        # The platform is not in it: it travels with the run.
        self.environment = with_helpers(user_environment()) | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(folder),
        }

    @property
    def head(self) -> RayNode:
        return self.nodes[0]

    @property
    def ray_address(self) -> str:
        return f"{self.head.address}:{self.port}"

    def add(self, accelerators: int, cpus: int = CPUS) -> RayNode:
        """Start another node with so many logical accelerators; returns when it has joined."""
        number = len(self.nodes) + 1
        size = [f"--num-cpus={cpus}", f"--num-gpus={accelerators}", "--object-store-memory=200000000"]
        size += ["--min-worker-port=0", "--max-worker-port=0"]  # whatever is free
        if self.nodes:
            where = [f"--address={self.ray_address}"]
        else:
            self.port = self._free_port()
            clients = f"--ray-client-server-port={self._free_port()}"
            where = ["--head", f"--port={self.port}", clients, f"--temp-dir={self.folder}", *self._dashboard_settings()]
        before = self._before(number)
        forked = self.forked and not before
        node = RayNode(self._address(number), before, [*where, *size], self.environment, forked)
        self.nodes.append(node)
        wait_for(lambda: node.is_up, UP_S, f"node {number}")
        node.look()
        return node

    def kill(self, node: RayNode) -> None:
        node.kill()

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.kill()

    @property
    def dashboard_address(self) -> str:
        return f"http://{self.head.address}:{self._dashboard_port}"

    def _dashboard_settings(self) -> list[str]:
        if not self._dashboard:
            return ["--include-dashboard=false"]
        self._dashboard_port = self._free_port()
        return [f"--dashboard-host={self._address(1)}", f"--dashboard-port={self._dashboard_port}"]

    def _address(self, number: int) -> str:
        raise NotImplementedError

    def _before(self, number: int) -> list[str]:
        raise NotImplementedError

    def _free_port(self) -> int:
        with socket.socket() as free:
            free.bind((self._address(1), 0))
            return int(free.getsockname()[1])


class Loopback(Nodes):
    """See the module's contract.

    Args:
        loses_nodes: a dead node is noticed in seconds, and not in half a minute as by default; on a busy machine Ray
            may then take a living one for dead.
    """

    def __init__(self, folder: Path, forked: bool = True, dashboard: bool = False, loses_nodes: bool = True) -> None:
        super().__init__(folder, forked, dashboard)
        if loses_nodes:
            self.environment |= QUICK

    def _address(self, number: int) -> str:
        return f"127.0.0.{number + 1}"  # for the first one Ray takes the host's own address

    def _before(self, number: int) -> list[str]:
        return []


@contextmanager
def closing(nodes: Nodes) -> Iterator[Nodes]:
    """They are over, with all their processes, at the end."""
    try:
        yield nodes
    finally:
        nodes.close()

# SPDX-License-Identifier: Apache-2.0
"""Clusters of several Ray nodes on one machine, for tests: nodes are added, killed and disconnected like hosts.

There are three kinds:

- `Loopback`: each node has its own address in 127.0.0.0/8. All nodes appear to be one host, so Ray's processes are
  forks of the one that the tests share, and a run's may be.
- `OtherClocks`: the same, but all nodes except the first have clocks of their own. It needs root.
- `Containers`: each node has a network namespace with a cable to a bridge, and process, mount and IPC namespaces with a
  /dev/shm of its own, like a container. It needs root and `ip`; otherwise its tests are skipped with the reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from drilled_run import TITLES, title, wait_for
from surroundings import shared_forks, user_environment, usual_environment, with_helpers

UP_S, END_S = 180.0, 30.0
CPUS = 20
QUICK = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
CONTAINED = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--mount"]
OWN_SHM = 'mount -t tmpfs -o size=2g tmpfs /dev/shm && exec "$0" "$@"'


class RayNode:
    """A Ray node: `ray start --block` in a process group of its own.

    Args:
        before: prefix of the command, to run it in namespaces.
        forked: whether Ray's processes are forks, which serve only a cluster's first job.

    Attributes:
        known: its processes as far as they were seen; they cannot be found any more once a parent has died.
    """

    def __init__(
        self, address: str, before: list[str], arguments: list[str], environment: dict[str, str], forked: bool
    ) -> None:
        self.address, self._folder = address, environment["RAY_TMPDIR"]
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
        # The launchers of forked workers: a launcher's parent is its raylet until one of them ends, and the fork ends
        # with it.
        of_node = f"--node-ip-address={self.address}"
        lines = ((process, title(process)) for process in psutil.process_iter())
        self.known |= {process for process, line in lines if of_node in line.split() and self._folder in line}

    @property
    def is_up(self) -> bool:
        """Return whether the node has joined its cluster."""
        assert self.process.poll() is None, self._log.read_text()
        return "Ray runtime started" in self._log.read_text()

    def processes(self, part: str) -> list[psutil.Process]:
        """Return the processes of a part, without forks of other processes."""
        self.look()
        return [process for process in self.known if TITLES[part] in title(process).partition(" ")[0]]

    def kill(self) -> None:
        """Kill all its processes at once, like a host that loses its power."""
        self.look()
        for process in self.known:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(END_S)


class Nodes:
    """A cluster without accelerators, whose first node has Ray's control process.

    Args:
        folder: folder of Ray's files; its path must be short.
        forked: whether Ray's processes may be forks, which serve only a cluster's first job.
        dashboard: whether there is a dashboard with a job server, at `dashboard_address`.
    """

    def __init__(self, folder: Path, forked: bool = True, dashboard: bool = False) -> None:
        self.folder, self.forked, self._dashboard = folder, forked, dashboard
        self.nodes: list[RayNode] = []
        # Ray records the machine's cluster here, so that other runs started meanwhile do not join it.
        (folder / "ray").mkdir(exist_ok=True)
        # The platform is not included, because the run brings it along.
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
        """Start another node with this many logical accelerators; return when it has joined."""
        number = len(self.nodes) + 1
        size = [f"--num-cpus={cpus}", f"--num-gpus={accelerators}", "--object-store-memory=200000000"]
        size += ["--min-worker-port=0", "--max-worker-port=0"]  # any free ports
        if self.nodes:
            where = [f"--address={self.ray_address}"]
        else:
            self.port = self._free_port()
            clients = f"--ray-client-server-port={self._free_port()}"
            where = ["--head", f"--port={self.port}", clients, f"--temp-dir={self.folder}", *self._dashboard_settings()]
        if self._dashboard:
            # The default port is the same for every Ray on a host, and a node takes no jobs without its agent.
            size.append(f"--dashboard-agent-listen-port={self._free_port()}")
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
            free.bind(("", 0))  # on every address, since Ray's control process listens on all of them
            return int(free.getsockname()[1])


class Loopback(Nodes):
    """Nodes with their own loopback addresses on one host.

    Args:
        loses_nodes: notice a dead node within seconds instead of half a minute; on a busy machine Ray may then take a
            living node for dead.
    """

    def __init__(self, folder: Path, forked: bool = True, dashboard: bool = False, loses_nodes: bool = True) -> None:
        super().__init__(folder, forked, dashboard)
        if loses_nodes:
            self.environment |= QUICK

    def _address(self, number: int) -> str:
        return f"127.0.0.{number + 1}"  # Ray uses the host's own address for the first node

    def _before(self, number: int) -> list[str]:
        return []


class OtherClocks(Loopback):
    """Nodes of which all but the first have clocks of their own, as hosts do.

    The time since boot is a day ahead (a time namespace, for every process), and the time of day, as Python sees it,
    two seconds.
    """

    BOOTED_BEFORE_S, AHEAD_S = 86_400, 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, forked=False, loses_nodes=False)
        if subprocess.run([*self._clocks, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("no time namespaces here: unshare --time is refused")
        self._ahead = folder / "ahead"
        self._ahead.mkdir()
        lines = ["import time", f"_time, time.time = time.time, lambda: _time() + {self.AHEAD_S}"]
        (self._ahead / "sitecustomize.py").write_text("\n".join(lines))

    @property
    def _clocks(self) -> list[str]:
        return ["unshare", "--time", f"--monotonic={self.BOOTED_BEFORE_S}", f"--boottime={self.BOOTED_BEFORE_S}"]

    def _before(self, number: int) -> list[str]:
        path = os.pathsep.join([str(self._ahead), self.environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return [] if number == 1 else [*self._clocks, "env", f"PYTHONPATH={path}"]


class Containers(Nodes):
    """Nodes that are isolated from each other like containers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._name = f"drl{os.getpid() % 100_000}"
        self._last_port = 6378
        self.bridge = f"{self._name}br"
        _ip("netns", "add", self.bridge)
        _ip("-n", self.bridge, "link", "add", self.bridge, "type", "bridge")
        _ip("-n", self.bridge, "link", "set", self.bridge, "up")
        if not shutil.which("unshare"):
            pytest.skip("no process namespaces here: unshare is not installed")

    def space(self, number: int) -> str:
        """Return the network namespace of a node, which is also the name of its end of the cable."""
        return f"{self._name}n{number}"

    def _address(self, number: int) -> str:
        return f"10.77.0.{number}"

    def _before(self, number: int) -> list[str]:
        space, far = self.space(number), f"{self._name}b{number}"
        _ip("netns", "add", space)
        _ip("link", "add", space, "netns", space, "type", "veth", "peer", "name", far, "netns", self.bridge)
        _ip("-n", self.bridge, "link", "set", far, "master", self.bridge, "up")
        _ip("-n", space, "address", "add", f"{self._address(number)}/24", "dev", space)
        _ip("-n", space, "link", "set", space, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        return ["ip", "netns", "exec", space, *CONTAINED, "sh", "-c", OWN_SHM]

    def inside(self, node: RayNode) -> list[str]:
        """Return the command prefix that runs a command in the namespaces of a node."""
        (raylet,) = (process for process in node.known if Path(title(process).split(" ")[0]).name == "raylet")
        return ["nsenter", f"--target={raylet.pid}", "--all"]

    def cut(self, node: RayNode) -> None:
        """Disconnect a node from the network."""
        space = self.space(self.nodes.index(node) + 1)
        _ip("-n", space, "link", "set", space, "down")

    def close(self) -> None:
        super().close()
        for space in (self.bridge, *(self.space(number + 1) for number in range(len(self.nodes)))):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)

    def _free_port(self) -> int:
        self._last_port += 1  # the port is only used in this test's namespaces
        return self._last_port


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network namespaces here: ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def closing(nodes: Nodes) -> Iterator[Nodes]:
    """Close the nodes, with all their processes, at the end."""
    try:
        yield nodes
    finally:
        nodes.close()


def shares_memory(process: psutil.Process) -> bool:
    """Return whether a weight receiver has mapped the memory that members of a weight sync on one host share."""
    return "memfd:recipe-weights" in Path(f"/proc/{process.pid}/maps").read_text()

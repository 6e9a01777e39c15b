# SPDX-License-Identifier: Apache-2.0
"""Devices, hosts and groups for the tests of the model of order (test_cuda_order.py, test_nccl_order.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cuda_order import BLOCKING, NON_BLOCKING, Device, Op, Stream, World
from nccl_order import Communicator, UniqueId

AT_ONCE_S = 0.05
SOON_S = 10.0


class Machine:
    """One device with a stream of each kind, which records its work as it is done."""

    def __init__(self, **settings: Any) -> None:
        self.world = World(**settings)
        self.device = Device(self.world, "rank 0")
        self.default = self.device.default
        self.blocking, self.other_blocking = Stream(self.device, BLOCKING), Stream(self.device, BLOCKING)
        self.free, self.other_free = Stream(self.device, NON_BLOCKING), Stream(self.device, NON_BLOCKING)
        self.done: list[str] = []

    def work(self, stream: Stream, name: str) -> Op:
        return stream.work(name, lambda: self.done.append(name))


class Threads:
    """Host threads whose end and errors are observed."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, work: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return self._threads[-1]

    def join(self) -> None:
        for thread in self._threads:
            thread.join(SOON_S)
            assert not thread.is_alive()


def stands_still(thread: threading.Thread) -> bool:
    thread.join(AT_ONCE_S)
    return thread.is_alive()


def pair(world: World, *names: str) -> tuple[list[Device], list[list[Communicator]]]:
    """Return two devices, and for each name a communicator of both, by name, then by rank."""
    devices = [Device(world, f"rank {rank}") for rank in range(2)]
    return devices, [group_of(devices, name) for name in names]


def group_of(devices: list[Device], name: str) -> list[Communicator]:
    unique, made = UniqueId(name), dict[int, Communicator]()
    threads = Threads()
    for rank, device in enumerate(devices):
        threads.start(
            lambda rank=rank, device=device: made.update(
                {rank: Communicator(device, unique, size=len(devices), rank=rank)}
            )
        )
    threads.join()
    return [made[rank] for rank in range(len(devices))]

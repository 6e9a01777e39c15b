# SPDX-License-Identifier: Apache-2.0
"""Replacements with which verl's checkpoint engine `nccl` runs without an accelerator. For tests only.

verl's engine and, below it, Ray's `NCCLGroup` with its rendezvous and bookkeeping are real. A communicator is a gloo
group, and an array of cupy's is one of numpy's. As on an accelerator:

- requests to a communicator are queued, and the call returns; `torch.cuda.synchronize` waits for all of them;
- creating a communicator waits, without a deadline, until all of its members do so;
- work whose member has died never ends. Aborting the communicator ends it without an error, leaving whatever happens to
  be in the buffer.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ray.util.collective import backend_registry
from verl.checkpoint_engine.base import CheckpointEngineRegistry

LOOPBACK = "127.0.0.1"
FOR_EVER = timedelta(hours=1)
TICK_S = 0.001
CONSTANTS = (
    "SUM PROD MAX MIN BOOL INT8 UINT8 INT INT32 UINT32 INT64 UINT64 HALF FLOAT16 FLOAT FLOAT32 DOUBLE FLOAT64 BFLOAT16"
)


class Device:
    """One accelerator: a thread that performs requests in order."""

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def ask(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._work.put(work)

    def synchronize(self) -> None:
        done = threading.Event()
        self.ask(done.set)
        done.wait()

    def _run(self) -> None:
        while True:
            self._work.get()()


DEVICE = Device()
# A gloo group finishes its work before it goes, so those of aborted communicators stay until the process ends.
KEPT: list[Any] = []


def unique_id() -> tuple[str, int, str]:
    """Return where members of a communicator meet: a store in the process that calls this."""
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    KEPT.append(store)
    return LOOPBACK, store.port, uuid.uuid4().hex


class Communicator:
    """cupy's `NcclCommunicator`, as far as Ray uses it."""

    def __init__(self, world_size: int, meeting: tuple[str, int, str], rank: int) -> None:
        host, port, name = meeting
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=FOR_EVER)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = FOR_EVER
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, world_size, options)
        self._aborted = threading.Event()

    def broadcast(self, source: int, target: int, count: int, kind: str, root: int, stream: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._queue(source, target, count, kind, lambda group, tensor: group.broadcast([tensor], options))

    def allReduce(self, source: int, target: int, count: int, kind: str, how: str, stream: int) -> None:
        options = dist.AllreduceOptions()
        self._queue(source, target, count, kind, lambda group, tensor: group.allreduce([tensor], options))

    def _queue(
        self, source: int, target: int, count: int, kind: str, start: Callable[[Any, torch.Tensor], Any]
    ) -> None:
        if self._group is None:
            raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")
        numbers = np.dtype(kind.lower())
        group, size = self._group, count * numbers.itemsize

        def work() -> None:
            # gloo gets a copy of its own, so that work after an abort touches no memory that was freed.
            own = torch.from_numpy(np.frombuffer(ctypes.string_at(source, size), numbers).copy())
            if self._done(lambda: start(group, own)):
                ctypes.memmove(target, own.data_ptr(), size)

        DEVICE.ask(work)

    def _done(self, start: Callable[[], Any]) -> bool:
        """Return whether the work was done; False once the communicator has been aborted."""
        try:
            running = start()
            while not running.is_completed():
                if self._aborted.wait(TICK_S):
                    KEPT.append(running)
                    return False
            running.wait()
            return True
        except RuntimeError:  # a member is gone, which NCCL does not notice
            self._aborted.wait()
            return False

    def destroy(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._aborted.set()
        KEPT.append(self._group)
        self._group = None


class Array(np.ndarray):
    """cupy's array."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)


class Nothing:
    """A stream, or a context that selects one or a device."""

    ptr = cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        DEVICE.synchronize()


class Event:
    """An event that is done after all earlier requests to the device."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def record(self, stream: Any) -> None:
        DEVICE.ask(self._done.set)

    def synchronize(self) -> None:
        self._done.wait()


class OnCPU:
    """``torch`` as verl's engine uses it, with buffers in host memory."""

    cuda = SimpleNamespace(
        synchronize=DEVICE.synchronize,
        empty_cache=lambda: None,
        current_device=lambda: 0,
        current_stream=Nothing,
        Stream=Nothing,
        stream=Nothing,
        Event=Event,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *shape: Any, device: str, **settings: Any) -> torch.Tensor:
        return torch.zeros(*shape, **settings)


def cupy() -> dict[str, ModuleType]:
    """Return the modules of cupy, by name."""
    modules = {name: ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl")}
    top, cuda, nccl = modules.values()
    nccl.__dict__.update({f"NCCL_{name}": name for name in CONSTANTS.split()})
    nccl.NcclCommunicator, nccl.get_unique_id = Communicator, unique_id
    nccl.get_build_version = nccl.get_version = lambda: 22800
    nccl.groupStart = nccl.groupEnd = lambda: None
    cuda.nccl, cuda.Device, cuda.Event = nccl, Nothing, Event
    cuda.Stream = cuda.ExternalStream = Nothing
    cuda.get_current_stream, cuda.runtime = Nothing, SimpleNamespace(getDeviceCount=lambda: 1)
    top.cuda, top.ndarray, top.uint8 = cuda, Array, np.uint8
    top.array = top.asarray = lambda values: np.asarray(values).view(Array)
    top.zeros = lambda size, dtype: np.zeros(size, dtype).view(Array)
    return modules


VERLS = "verl.checkpoint_engine.nccl_checkpoint_engine"
OURS = "recipe.async_engine.weights.nccl_engine"
RAYS = "ray.util.collective.collective_group"
NEED_CUPY = (OURS, VERLS, f"{RAYS}.nccl_collective_group", f"{RAYS}.nccl_util", f"{RAYS}.cuda_stream")


@contextmanager
def for_a_while() -> Iterator[None]:
    """Undo at the end what `install` does in this process."""
    yield
    CheckpointEngineRegistry._registry.pop("nccl", None)
    backend_registry._global_registry._map.pop("NCCL", None)
    forget()


def forget() -> dict[str, ModuleType]:
    """Remove cupy, and the modules that import it, from the imported modules; return them.

    They are also removed from their packages, because `from package import module` looks there first.
    """
    found = {name: sys.modules.pop(name) for name in (*cupy(), *NEED_CUPY) if name in sys.modules}
    for name in found:
        package, _, module = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).pop(module, None)
    return found


def install(ours: bool) -> None:
    """Install the engine `nccl` in this process: verl's own, or this package's, which takes its name."""
    if "cupy" not in sys.modules:
        sys.modules.update(cupy())
        _use_host_memory()
    from verl.checkpoint_engine.nccl_checkpoint_engine import NCCLCheckpointEngine

    from recipe.async_engine.weights import nccl_engine
    from recipe.async_engine.weights.nccl_engine import BoundedNCCLCheckpointEngine

    nccl_engine.torch = OnCPU()
    CheckpointEngineRegistry.register("nccl")(BoundedNCCLCheckpointEngine if ours else NCCLCheckpointEngine)


def _use_host_memory() -> None:
    from ray.util import collective
    from ray.util.collective.collective_group import nccl_collective_group, nccl_util
    from verl.checkpoint_engine import nccl_checkpoint_engine

    nccl_checkpoint_engine.torch = OnCPU()
    nccl_util.get_tensor_ptr = lambda array: array.data.ptr if isinstance(array, Array) else array.data_ptr()
    nccl_util.get_tensor_device = lambda array: 0
    # Make members that wait for each other poll more often than every second.
    nccl_collective_group.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 20))
    collective.register_collective_backend("NCCL", nccl_collective_group.NCCLGroup)

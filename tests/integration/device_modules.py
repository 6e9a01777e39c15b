# SPDX-License-Identifier: Apache-2.0
"""cupy and Ray's NCCL group as verl's engine uses them, over the devices of cuda_order.py. For tests only.

verl's engine `nccl` and this package's are real, as is Ray's `NCCLGroup` below them with its rendezvous and
bookkeeping. There are as many processes as devices. Each process is represented by some threads, with its own copy of
whatever a process has once. A thread belongs to the process of the thread that started it.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import zmq
from cuda_order import BLOCKING, CALL, NON_BLOCKING, Device, Event, Stream
from device_tensors import OnDevice, Pageable, Pinned, Torch, current, here, pointer, raw, stream_at, using
from nccl_on_cpu import CONSTANTS, NEED_CUPY, for_a_while, forget
from nccl_order import Communicator, UniqueId

from recipe.async_engine.weights import arena, snapshot

WEIGHTS = "recipe.async_engine.weights"
ON_A_DEVICE = (
    "verl.checkpoint_engine.base",
    "verl.checkpoint_engine.nccl_checkpoint_engine",
    *(f"{WEIGHTS}.{name}" for name in ("nccl_engine", "arena", "snapshot", "checksum", "staged")),
    "recipe.async_engine.engines.staged_model",
    "recipe.async_engine.log_prob_servers.adapter",
)
"""Modules whose ``torch`` is an accelerator's."""
MEET_S = 0.005
NUMBERS = itertools.count()


class Array(np.ndarray):
    """cupy's array: writes to it are queued on cupy's current stream."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)

    def __setitem__(self, place: Any, value: Any) -> None:
        into, values = self.view(np.ndarray)[place], np.asarray(value)
        current("cupy").work("copy", lambda: np.copyto(into, values))


def as_array(values: Any) -> Array:
    """Return device data unchanged; for data in host memory queue a copy, for which nobody waits.

    CuPy, `cupy.asarray`: data of the host goes through pinned memory of CuPy's own, "asynchronously".
    """
    if isinstance(values, OnDevice):
        return raw(values.detach()).numpy().view(Array)
    found = raw(values.detach()).numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    made: Array = np.empty_like(found).view(Array)
    made[...] = found.copy()
    return made


class CupyStream:
    """cupy.cuda.Stream, which is a blocking stream by default."""

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, model: Stream | None = None
    ) -> None:
        made = here().default if null else None
        self.model = model or made or Stream(here(), NON_BLOCKING if non_blocking else BLOCKING)
        self._use: AbstractContextManager[None] | None = None

    @property
    def ptr(self) -> int:
        return pointer(self.model)

    def record(self, event: CupyEvent | None = None) -> CupyEvent:
        event = event or CupyEvent()
        event.record(self)
        return event

    def wait_event(self, event: CupyEvent) -> None:
        self.model.wait_event(event.model)

    def synchronize(self) -> None:
        self.model.synchronize()

    @property
    def done(self) -> bool:
        return self.model.query()

    def __enter__(self) -> CupyStream:
        self._use = using("cupy", self.model)
        self._use.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._use is not None
        self._use.__exit__(None, None, None)


class CupyEvent:
    """cupy.cuda.Event."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.model = Event(here())

    def record(self, stream: CupyStream | None = None) -> None:
        self.model.record(stream.model if stream is not None else current("cupy"))

    def synchronize(self) -> None:
        self.model.synchronize()

    @property
    def done(self) -> bool:
        return self.model.query()


class Address(int):
    """A pointer that keeps its memory alive."""

    memory: Any

    @classmethod
    def of(cls, array: Any) -> Address:
        made = cls(array.data.ptr if isinstance(array, Array) else raw(array).data_ptr())
        made.memory = array
        return made


class NcclCommunicator:
    """cupy's communicator, as far as Ray uses it."""

    def __init__(self, size: int, unique: UniqueId, rank: int) -> None:
        self.model = Communicator(here(), unique, size, rank)
        self.abort = self.destroy = self.model.abort

    def broadcast(self, source: Address, target: Address, count: int, kind: str, root: int, stream: int) -> None:
        size = count * np.dtype(kind.lower()).itemsize

        def effect(memory: dict[int, Address]) -> None:
            for rank, place in memory.items():
                if rank != root:
                    ctypes.memmove(place, memory[root], size)

        self.model.launch(stream_at(stream), ("broadcast", count, kind, root), effect, target)

    def allReduce(self, source: Address, target: Address, count: int, kind: str, how: str, stream: int) -> None:
        numbers = np.dtype(kind.lower())

        def effect(memory: dict[int, Address]) -> None:
            size = count * numbers.itemsize
            total = sum(np.frombuffer(ctypes.string_at(place, size), numbers) for place in memory.values())
            for place in memory.values():
                ctypes.memmove(place, np.asarray(total, numbers).ctypes.data, size)

        self.model.launch(stream_at(stream), ("all-reduce", count, kind), effect, target)


def cupy() -> dict[str, ModuleType]:
    """Return the modules of cupy, by name."""
    modules = {name: ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl")}
    top, cuda, nccl = modules.values()
    nccl.__dict__.update({f"NCCL_{name}": name for name in CONSTANTS.split()})
    nccl.NcclCommunicator, nccl.get_unique_id = NcclCommunicator, lambda: UniqueId(f"weights {next(NUMBERS)}")
    nccl.get_build_version = nccl.get_version = lambda: 22800
    nccl.groupStart = nccl.groupEnd = lambda: None
    cuda.nccl, cuda.Device, cuda.Stream, cuda.Event = nccl, Accelerator, CupyStream, CupyEvent
    cuda.ExternalStream = lambda address, device_id=-1: CupyStream(model=stream_at(address))
    cuda.get_current_stream = lambda: CupyStream(model=current("cupy"))
    cuda.runtime = SimpleNamespace(getDeviceCount=lambda: 1)
    top.cuda, top.ndarray, top.uint8 = cuda, Array, np.uint8
    top.array = top.asarray = as_array
    top.zeros = lambda size, dtype: np.zeros(size, dtype).view(Array)
    return modules


class Accelerator(nullcontext[None]):
    """cupy.cuda.Device."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()

    def synchronize(self) -> None:
        here().synchronize()


class Rendezvous:
    """Ray's named actors through which the members of a group meet."""

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError)

    def __init__(self) -> None:
        self.stores: dict[str, Rendezvous.Store] = {}

    class Store:
        def __init__(self) -> None:
            self.found: UniqueId | None = None
            self.has_it = threading.Event()
            self.set_id = SimpleNamespace(remote=self.set)
            self.wait_and_get_id = SimpleNamespace(remote=lambda: self)

        def set(self, found: UniqueId) -> None:
            self.found = found
            self.has_it.set()

    def options(self, name: str, lifetime: str) -> Any:
        return SimpleNamespace(remote=lambda _: self.stores.setdefault(name, Rendezvous.Store()))

    def get_actor(self, name: str) -> Any:
        if name not in self.stores:
            raise ValueError(name)
        return self.stores[name]

    def get(self, found: Any, timeout: float | None = None) -> Any:
        if not isinstance(found, Rendezvous.Store):
            return found
        if not found.has_it.wait(timeout):
            raise TimeoutError
        return found.found

    def kill(self, store: Any) -> None:
        self.stores = {name: other for name, other in self.stores.items() if other is not store}


class OfEachProcess:
    """One object per process, in place of a global of a module that all processes import."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, dict[Device, Any]()

    def here(self) -> Any:
        return self._made.setdefault(here(), self._make())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here(), name)


class Zmq:
    """``zmq`` as verl's engine uses it: contexts live until `end_contexts`, as if until the end of their process.

    A context that the garbage collector ends waits for its sockets, in whatever thread that happens.
    """

    contexts: ClassVar[list[zmq.Context[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name)

    def Context(self) -> zmq.Context[Any]:
        self.contexts.append(zmq.Context())
        return self.contexts[-1]


def end_contexts() -> None:
    """Destroy the contexts of processes that have ended."""
    while Zmq.contexts:
        Zmq.contexts.pop().destroy(linger=0)


def pinned(make: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Wrap an arena's constructor so that its tensors are known as pinned or pageable."""

    def made(forms: Any, pinned: bool) -> list[torch.Tensor]:
        return [tensor.as_subclass(Pinned if pinned else Pageable) for tensor in make(forms, pinned)]

    return made


def _start(self: threading.Thread, start: Callable[[threading.Thread], None] = threading.Thread.start) -> None:
    """Start a thread with its parent's context; Python 3.14 has the setting ``thread_inherit_context`` for this."""
    context, run = copy_context(), self.run
    if context.get(CALL) is not None:
        self.run = lambda: context.run(run)  # type: ignore[method-assign]
    start(self)


@contextmanager
def installed() -> Iterator[None]:
    """Install this package's engine `nccl` temporarily, for processes that are threads."""
    before = forget()
    sys.modules.update(cupy())
    meeting = Rendezvous()
    with for_a_while():
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in NEED_CUPY}
        from ray.util.collective import collective
        from ray.util.collective import util as rays

        group, verls = modules["nccl_collective_group"], modules["nccl_checkpoint_engine"]
        collective.register_collective_backend("NCCL", group.NCCLGroup)
        streams = OfEachProcess(lambda: modules["cuda_stream"].StreamPool(0))
        rays_context = SimpleNamespace(get_node_id=lambda: here().node)
        ray_of_verl = SimpleNamespace(
            get_runtime_context=lambda: rays_context, util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        )
        patches = [
            *(patch.object(importlib.import_module(name), "torch", Torch()) for name in ON_A_DEVICE),
            patch.object(modules["nccl_util"], "get_tensor_ptr", Address.of),
            patch.object(modules["nccl_util"], "get_tensor_device", lambda array: 0),
            patch.object(group, "get_stream_pool", lambda index: streams.here()),
            patch.object(group, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(MEET_S))),
            patch.object(group, "ray", meeting),
            patch.object(rays, "NCCLUniqueIDStore", meeting),
            patch.object(collective, "ray", meeting),
            patch.object(collective, "_check_inside_actor", lambda: None),
            patch.object(collective, "_group_mgr", OfEachProcess(collective.GroupManager)),
            patch.object(verls, "ray", ray_of_verl),
            patch.object(verls, "zmq", Zmq()),
            patch.object(snapshot, "in_one_piece", pinned(arena.in_one_piece)),
            patch.object(arena, "pin_memory", lambda address, size: None),
            patch.object(arena, "unpin_memory", lambda address: None),
            patch.object(threading.Thread, "start", _start),
        ]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in reversed(patches):
                each.stop()
    sys.modules.update(before)

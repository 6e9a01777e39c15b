# SPDX-License-Identifier: Apache-2.0
"""``torch`` as code for accelerators uses it, over the devices of cuda_order.py. For tests only.

A tensor on a device is one in host memory whose operations are queued on the current stream of its thread; a host that
reads it waits for them. Views and shapes are available at once. Host memory is pinned if that was requested. Torch's
own streams are non-blocking (c10/cuda/CUDAStream.cpp creates them with cudaStreamNonBlocking), and each thread has its
own current stream, at first the legacy default one (PyTorch, "CUDA semantics", CUDA streams).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cuda_order import CALL, NON_BLOCKING, Device, Event, Stream
from torch.utils._pytree import tree_leaves, tree_map_only

READS = {"item", "tolist", "numpy", "equal", "allclose", "__bool__", "__int__", "__float__", "__array__", "__repr__"}
AT_ONCE = {"requires_grad_", "detach_", "record_stream"}
FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "empty_like", "zeros_like")
CUDA = torch.device("cuda", 0)
CURRENT = threading.local()
POINTERS: dict[int, Stream] = {}


def here() -> Device:
    """Return the device of the process to which this thread belongs."""
    call = CALL.get()
    assert call is not None, "this thread belongs to no process"
    return call.device


def pointer(stream: Stream) -> int:
    """Return the pointer by which libraries exchange a stream; 0 is the legacy default one."""
    if stream is stream.device.default:
        return 0
    POINTERS[id(stream)] = stream
    return id(stream)


def stream_at(address: int) -> Stream:
    return POINTERS[address] if address else here().default


def current(library: str) -> Stream:
    """Return the stream on which a library queues this thread's work."""
    found: Stream | None = getattr(CURRENT, library, None)
    return found or here().default


@contextmanager
def using(library: str, stream: Stream) -> Iterator[None]:
    before = getattr(CURRENT, library, None)
    setattr(CURRENT, library, stream)
    try:
        yield
    finally:
        setattr(CURRENT, library, before)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class Placed(torch.Tensor):
    """A tensor whose location is known."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        kinds = {type(leaf) for leaf in tree_leaves((args, kwargs))}
        place = next(kind for kind in (OnDevice, Pinned, Pageable) if kind in kinds)
        if func.__name__ == "__get__" and name in PROPERTIES:
            return PROPERTIES[name](args[0])
        if name in METHODS:
            return METHODS[name](*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, raw, (args, kwargs))
        if place is not OnDevice:
            return _placed(func(*args, **kwargs), args, place)
        if name in READS:
            current("torch").synchronize()
            return func(*args, **kwargs)
        if "out" in kwargs or (name.endswith("_") and not name.endswith("__") and name not in AT_ONCE):
            _queue(name, lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0]).as_subclass(OnDevice)
        if name == "__getitem__" and _tensors(args[1:]):
            # Derived only from its shape, because the memory that it reads is not determined before its turn.
            like = func(*tree_map_only(torch.Tensor, lambda found: found.to("meta"), args))
            result = torch.empty_like(like, device="cpu")
        else:
            result = func(*args, **kwargs)
        inputs, outputs = {leaf.untyped_storage().data_ptr() for leaf in _tensors(args)}, _tensors(result)
        if not outputs:
            return result
        if any(output.untyped_storage().data_ptr() not in inputs for output in outputs):
            # Computed when its turn comes, into the memory that was allocated now.
            _queue(name, lambda: [out.copy_(new) for out, new in zip(outputs, _tensors(func(*args, **kwargs)))])  # noqa: B905
        return tree_map_only(torch.Tensor, lambda found: found.as_subclass(OnDevice), result)


class OnDevice(Placed):
    """A tensor on an accelerator."""


class Pinned(Placed):
    """A tensor in pinned host memory."""


class Pageable(Placed):
    """A tensor in pageable host memory."""


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _placed(result: Any, args: Any, place: type[Placed]) -> Any:
    """Give views the location of the memory that they are views of."""
    storages = {leaf.untyped_storage().data_ptr() for leaf in _tensors(args)}
    if not _tensors(result):
        return result
    return tree_map_only(
        torch.Tensor,
        lambda found: found.as_subclass(place) if found.untyped_storage().data_ptr() in storages else found,
        result,
    )


def _queue(name: str, effect: Callable[[], Any]) -> None:
    @torch.no_grad()
    def run() -> None:
        effect()

    current("torch").work(name, run)


@torch.no_grad()
def _copy(target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
    into, out = raw(target), raw(source) if isinstance(source, torch.Tensor) else torch.as_tensor(source)
    if not isinstance(target, OnDevice) and not isinstance(source, OnDevice):
        into.copy_(out)
    elif isinstance(target, OnDevice) and (isinstance(source, OnDevice) or out.dim() == 0):
        _queue("copy", lambda: into.copy_(out))
    else:
        host = source if isinstance(target, OnDevice) else target
        effect = torch.no_grad()(lambda: into.copy_(out))
        current("torch").copy("copy", effect, not isinstance(host, Pinned), non_blocking)
    return target


def _set(target: torch.Tensor, place: Any, value: Any) -> None:
    part = raw(target)[place]
    _copy(part.as_subclass(type(target)), value)


def _to(tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    where = kwargs.pop("device", next((arg for arg in args if isinstance(arg, str | torch.device)), None))
    dtype = kwargs.pop("dtype", next((arg for arg in args if isinstance(arg, torch.dtype)), tensor.dtype))
    on_device = isinstance(tensor, OnDevice) if where is None else torch.device(where).type == "cuda"
    if on_device == isinstance(tensor, OnDevice) and dtype == tensor.dtype:
        return tensor
    made = torch.empty(tensor.shape, dtype=dtype).as_subclass(OnDevice if on_device else Pageable)
    return _copy(made, tensor, non_blocking)


METHODS: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "__setitem__": _set,
    "to": _to,
    "cpu": lambda tensor, **how: _to(tensor, "cpu", **how),
    "cuda": lambda tensor, *_, **how: _to(tensor, "cuda", **how),
    "is_pinned": lambda tensor: isinstance(tensor, Pinned),
    "pin_memory": lambda tensor: _copy(torch.empty(tensor.shape, dtype=tensor.dtype).as_subclass(Pinned), tensor),
}
PROPERTIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "device": lambda tensor: CUDA if isinstance(tensor, OnDevice) else raw(tensor).device,
    "is_cuda": lambda tensor: isinstance(tensor, OnDevice),
    "is_cpu": lambda tensor: not isinstance(tensor, OnDevice),
}


class TorchStream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, model: Stream | None = None) -> None:
        self.model = model or Stream(here(), NON_BLOCKING)
        self.device, self.priority = CUDA, priority

    @property
    def cuda_stream(self) -> int:
        return pointer(self.model)

    def wait_event(self, event: TorchEvent) -> None:
        self.model.wait_event(event.model)

    def wait_stream(self, stream: TorchStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: TorchEvent | None = None) -> TorchEvent:
        event = event or TorchEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.model.synchronize()

    def query(self) -> bool:
        return self.model.query()


class TorchEvent:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.model = Event(here())

    def record(self, stream: TorchStream | None = None) -> None:
        self.model.record(stream.model if stream is not None else current("torch"))

    def wait(self, stream: TorchStream | None = None) -> None:
        (stream.model if stream is not None else current("torch")).wait_event(self.model)

    def synchronize(self) -> None:
        self.model.synchronize()

    def query(self) -> bool:
        return self.model.query()


def as_tensor(memory: np.ndarray) -> torch.Tensor:
    """Return an array of cupy's as a tensor of the same memory."""
    return torch.from_numpy(memory.view(np.ndarray)).as_subclass(OnDevice)


class Torch:
    """The ``torch`` of a module that uses an accelerator."""

    cuda = SimpleNamespace(
        Stream=TorchStream,
        Event=TorchEvent,
        ExternalStream=lambda address, device=None: TorchStream(model=stream_at(address)),
        stream=lambda stream: nullcontext() if stream is None else using("torch", stream.model),
        current_stream=lambda device=None: TorchStream(model=current("torch")),
        default_stream=lambda device=None: TorchStream(model=here().default),
        synchronize=lambda device=None: here().synchronize(),
        empty_cache=lambda: here().free(),
        current_device=lambda: 0,
        set_device=lambda device: None,
        device=lambda device: nullcontext(),
        is_available=lambda: True,
    )

    accelerator = SimpleNamespace(is_available=lambda: True, current_stream=cuda.current_stream)

    def __getattr__(self, name: str) -> Any:
        if name == "as_tensor":
            return as_tensor
        found = getattr(torch, name)
        return self._factory(found) if name in FACTORIES else found

    @staticmethod
    def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            kind = torch.device(device).type if device is not None else "cpu"
            if device is None and args and isinstance(args[0], OnDevice):
                kind = "cuda"
            args = tree_map_only(torch.Tensor, raw, args)
            if kind not in ("cuda", "cpu"):
                return make(*args, device=device, **kwargs)
            found = make(*args, **kwargs)
            if kind == "cpu":
                return found.as_subclass(Pinned if pin_memory else Pageable)
            values, target = found.clone(), found.as_subclass(OnDevice)
            if "empty" not in make.__name__:
                _queue(make.__name__, lambda: found.copy_(values))
            return target

        return made

# SPDX-License-Identifier: Apache-2.0
"""A copy of the trainer's weights as they are at one version, to be sent while training goes on.

Contract: after :meth:`WeightSnapshot.take` nothing that training does changes what is sent, however often. The copy is
in host memory of trainer rank 0, which is used again for the next version, in the dtype in which rollout engines hold
the weights; parameters that they hold in a wider one keep theirs. Other ranks, which gather each parameter with rank 0
and may have to go through an equal stream while it is sent, keep names, shapes and dtypes only.

Shown by tests/integration/test_snapshot.py and, in runs, tests/e2e/test_fully_async.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from verl.utils.torch_dtypes import PrecisionType

from recipe.async_engine.core.errors import RecipeError

NamedTensor = tuple[str, torch.Tensor]


class SnapshotError(RecipeError):
    """There is no copy to send, or the last one is still being sent."""


@dataclass(frozen=True)
class Wire:
    """In what dtypes weights travel: the narrowest that lose nothing that a receiver would keep.

    ``dtype``: of floating-point parameters that training holds in a wider one. ``wide``: the last two parts of the
    names of those that engines hold in a wider one as well, and which travel as they are.
    """

    dtype: torch.dtype = torch.float64
    wide: frozenset[str] = frozenset()

    def dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """In which a parameter travels."""
        narrows = tensor.is_floating_point() and tensor.dtype.itemsize > self.dtype.itemsize
        return self.dtype if narrows and last_parts(name) not in self.wide else tensor.dtype


def widest(*names: str) -> torch.dtype:
    """The dtype of these names, as verl has them, that keeps what any of them does; float64 for one that is unknown."""
    try:
        return max((PrecisionType.to_dtype(name) for name in names), key=lambda dtype: dtype.itemsize)
    except RuntimeError:
        return torch.float64


class WeightSnapshot:
    """See the module's contract.

    Args:
        is_sender: whether this is trainer rank 0.
        device: to which each tensor is brought as it is sent; None where the checkpoint engine takes it from the host.
    """

    def __init__(self, is_sender: bool, device: torch.device | None = None) -> None:
        self._is_sender = is_sender
        self._device = device
        self._tensors: list[NamedTensor] = []
        self._version: int | None = None
        self._in_use = threading.Lock()

    @torch.no_grad()
    def take(self, weights: Iterable[NamedTensor], version: int, wire: Wire) -> None:
        """Copy ``weights`` as ``version``, in the dtypes that ``wire`` says.

        Raises:
            SnapshotError: the last copy is still being sent.
        """
        with self._alone(f"version {version} cannot be copied"):
            self._version = None
            memory = self._tensors
            self._tensors = []
            for place, (name, tensor) in enumerate(weights):
                dtype = wire.dtype_of(name, tensor)
                kept = memory[place][1] if place < len(memory) else None
                if kept is None or kept.shape != tensor.shape or kept.dtype != dtype:
                    kept = self._room_for(tensor, dtype)
                if self._is_sender:
                    kept.copy_(tensor)
                self._tensors.append((name, kept))
            self._version = version

    @contextmanager
    def stream(self, version: int) -> Iterator[Iterator[NamedTensor]]:
        """The tensors of ``version``, in the order in which they were copied.

        Raises:
            SnapshotError: that version was not copied as a whole, or is being sent already.
        """
        with self._alone(f"version {version} cannot be sent"):
            if self._version != version:
                raise SnapshotError(f"version {version} cannot be sent: the copy is of version {self._version}")
            yield ((name, self._on_device(tensor)) for name, tensor in self._tensors)

    def _room_for(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self._is_sender:
            return torch.empty(tensor.shape, dtype=dtype, device="meta")
        # Copies from a device are quicker into memory that the system cannot move.
        pinned = tensor.device.type != "cpu"
        return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=pinned)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device is None or tensor.is_meta else tensor.to(self._device, non_blocking=True)

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise SnapshotError(f"{what}: the copy of version {self._version} is in use")
        try:
            yield
        finally:
            self._in_use.release()


def last_parts(name: str) -> str:
    """By which a parameter of an engine and one of the model's files are taken for the same."""
    return ".".join(name.split(".")[-2:])

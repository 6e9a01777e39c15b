# SPDX-License-Identifier: Apache-2.0
"""A copy of the trainer's weights at one version, to be sent while training goes on.

Contract: after :meth:`WeightSnapshot.take` training no longer affects what is sent, even if the copy is sent several
times. The copy is in host memory of trainer rank 0, in the dtype that rollout engines use. If engines keep a parameter
in a wider dtype, the copy has the trainer's dtype for it. The memory is one allocation of exactly the size of the copy,
pinned if there is an accelerator, and reused for the next version. Training waits only once, until everything is
copied. The other ranks only take part in gathering each parameter. They keep names, shapes and dtypes without data,
because they may have to iterate over the same names when the copy is sent. Shown by tests/integration/test_snapshot.py
and, in runs, tests/e2e/test_fully_async.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from verl.utils.torch_dtypes import PrecisionType

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.weights.arena import Form, in_one_piece, settle

NamedTensor = tuple[str, torch.Tensor]


class WeightsError(RecipeError):
    """The trainer's weights cannot be copied, sent or merged in their present form."""


@dataclass(frozen=True)
class Wire:
    """The dtypes in which weights are sent: the narrowest ones with which no receiver loses precision.

    Floating-point parameters that training keeps in a wider dtype than ``dtype`` are converted to ``dtype``. The
    exceptions are those whose last two name components are in ``wide``, because engines use a wider dtype for them too.
    """

    dtype: torch.dtype = torch.float64
    wide: frozenset[str] = frozenset()

    def dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        narrows = tensor.is_floating_point() and tensor.dtype.itemsize > self.dtype.itemsize
        return self.dtype if narrows and last_parts(name) not in self.wide else tensor.dtype


def widest(*names: str) -> torch.dtype:
    """Return the widest of the dtypes with these names, or float64 if verl does not know one of the names."""
    try:
        return max((PrecisionType.to_dtype(name) for name in names), key=lambda dtype: dtype.itemsize)
    except RuntimeError:
        return torch.float64


class WeightSnapshot:
    """The copy of the weights on one trainer rank.

    Args:
        is_sender: whether this is trainer rank 0.
        device: device to which each tensor is moved for sending; None if the checkpoint engine sends from host memory.
    """

    def __init__(self, is_sender: bool, device: torch.device | None = None) -> None:
        self._is_sender = is_sender
        self._device = device
        self._forms: list[tuple[str, Form]] = []
        self._tensors: list[NamedTensor] = []
        self._version: int | None = None
        self._in_use = threading.Lock()

    @torch.no_grad()
    def take(self, export: Callable[[], Iterable[NamedTensor]], version: int, wire: Wire) -> None:
        """Copy the weights that ``export()`` yields, in the dtypes of ``wire``. The copy is of version ``version``.

        In the first call, and after a change of shapes, every rank iterates over the weights twice: first to find out
        how much memory the copy needs, then to copy.

        Raises:
            WeightsError: the last copy is still being sent, or the two iterations yielded different shapes.
        """
        with self._alone(f"version {version} cannot be copied"):
            self._version = None
            if not self._copy(export(), wire) and not self._copy(export(), wire):
                raise WeightsError(f"version {version} cannot be copied: its tensors changed shape during the copy")
            settle()
            self._version = version

    def _copy(self, weights: Iterable[NamedTensor], wire: Wire) -> bool:
        """Copy ``weights`` and return True. If the present memory does not have their shapes, only allocate new memory
        for them and return False.
        """
        forms: list[tuple[str, Form]] = []
        pinned = False
        for name, tensor in weights:
            forms.append((name, (tensor.shape, wire.dtype_of(name, tensor))))
            place = len(forms) - 1
            if self._is_sender and self._forms[place : place + 1] == forms[-1:]:
                self._tensors[place][1].copy_(tensor, non_blocking=True)
            pinned = pinned or tensor.is_cuda
        if forms == self._forms:
            return True
        # Copies to the old memory must finish before it is freed.
        settle()
        self._forms, self._tensors = [], []
        room = in_one_piece([form for _, form in forms], pinned) if self._is_sender else map(_described, forms)
        self._tensors = [(name, tensor) for (name, _), tensor in zip(forms, room, strict=True)]
        self._forms = forms
        return False

    @contextmanager
    def stream(self, version: int) -> Iterator[Iterator[NamedTensor]]:
        """Yield an iterator over the tensors of ``version``, in the order in which they were copied.

        Raises:
            WeightsError: the copy is incomplete, is of another version, or is being made or sent at present.
        """
        with self._alone(f"version {version} cannot be sent"):
            if self._version != version:
                raise WeightsError(f"version {version} cannot be sent: the copy is of version {self._version}")
            yield ((name, self._on_device(tensor)) for name, tensor in self._tensors)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device is None or tensor.is_meta else tensor.to(self._device, non_blocking=True)

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise WeightsError(f"{what}: the copy of version {self._version} is in use")
        try:
            yield
        finally:
            self._in_use.release()


def _described(form: tuple[str, Form]) -> torch.Tensor:
    shape, dtype = form[1]
    return torch.empty(shape, dtype=dtype, device="meta")


def last_parts(name: str) -> str:
    """Return the last two components of a parameter's name, which are the same in the engine and in the trainer."""
    return ".".join(name.split(".")[-2:])

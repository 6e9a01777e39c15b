# SPDX-License-Identifier: Apache-2.0
"""Staging of weights in a second instance of the model, in the process of an engine.

Contract: staging works as in `recipe.async_engine.weights.staged`. Weights are loaded on a separate thread while the
engine generates.

To find out whether the weights are complete, all floating-point parameters are filled with NaN when a stream starts. A
parameter that still contains NaN at the end of the stream is incomplete. Therefore weights that are NaN are refused
too. (The names that vLLM's loaders return do not suffice, because they include a packed parameter as soon as one of its
components is loaded.)

The second instance is created once. The engine's own loaders fill it. Values that the engine derives from loaded
weights (packed layers, for example) are also computed in the second instance, while the engine generates. A swap
overwrites the live tensors, so everything that refers to them gets the new values: objects other than modules (such as
those with a router's bias or an attention backend's sinks), views, captured CUDA graphs, and compiled code. To find the
tensors to copy, both instances are traversed in parallel (`recipe.async_engine.weights.held`). A swap copies
parameters, buffers, all tensors that share storage with one of these, and all derived tensors. A derived object other
than a tensor (a kernel's own packed format) is assigned to the live instance. If a tensor has no counterpart of the
same shape and dtype, the version is refused before the swap.

With ``staging=host`` the second instance is in host memory. In that case the swap copies parameters and buffers from
host memory, and the engine then derives the other values from the live weights. Shown by
tests/integration/test_staged_model.py; in the real engine by test_staged_architectures.py and
tests/e2e/test_fully_async.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from recipe.async_engine.weights.held import ABSENT, Pair, pairs
from recipe.async_engine.weights.staged import NamedTensors, StagedWeights, StagingRefused


class StagedModel(StagedWeights):
    """The staged weights of a whole model.

    Args:
        live: the instance with which the engine generates.
        spare: another instance of the same model, without weights.
        finish: the engine's function that derives values (packed layers, for example) from the loaded weights of an
            instance. It is called for every version.
        in_host: whether ``spare`` is in host memory. In that case ``finish`` can work only on ``live``.
    """

    def __init__(
        self, live: nn.Module, spare: nn.Module, finish: Callable[[nn.Module], None], in_host: bool = False
    ) -> None:
        self._live, self._spare = live, spare
        self._finish, self._in_host = finish, in_host
        self._loaded: set[str] = set()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hands: list[Callable[[], None]] = []
        self._derived: list[torch.Tensor] = []
        # Keep the tensors into which loaders write. After a load, the engine may replace them by packed weights.
        found = [pair for pair in pairs(spare, live) if isinstance(pair.mine, torch.Tensor) and not pair.is_shared]
        self._loadable = [(pair, pair.mine.data, pair.mine.untyped_storage().nbytes()) for pair in found]

    def _begin(self) -> None:
        self._loaded, self._copies, self._hands = set(), [], []
        for pair, data, nbytes in self._loadable:
            if data.untyped_storage().nbytes() != nbytes:
                data.untyped_storage().resize_(nbytes)
            pair.mine.data = data
            if pair.put_mine is not None:
                pair.put_mine(pair.mine)
        fill_with_nan(self._spare)
        # Start with the values of the live buffers, because the stream may lack buffers.
        live = dict(self._live.named_buffers())
        for name, buffer in self._spare.named_buffers():
            if buffer is not live[name]:
                buffer.copy_(live[name])

    def _load(self, weights: NamedTensors) -> None:
        buffers = dict(self._spare.named_buffers())
        parameters = []
        for name, tensor in weights:
            if name in buffers:
                buffers[name].copy_(tensor)
            else:
                parameters.append((name, tensor))
        self._loaded |= self._spare.load_weights(parameters) or set()

    def _find_problem(self) -> str | None:
        return find_incomplete(self._spare, self._loaded)

    def _derive(self) -> None:
        weights = {_storage(tensor) for tensor in _slots(self._spare)}
        before = list(pairs(self._spare, self._live))
        if not self._in_host:
            self._finish(self._spare)
        weights |= {_storage(tensor) for tensor in _slots(self._spare)}
        at, known = {pair.path: pair.mine for pair in before}, {id(pair.mine) for pair in before}
        known -= {id(tensor) for tensor in self._derived}
        self._copies, self._hands, self._derived = [], [], []
        places: set[tuple[Any, ...]] = set()
        held = set()
        for pair in pairs(self._spare, self._live):
            is_new = id(pair.mine) not in known
            if pair.is_shared:
                continue
            if isinstance(pair.mine, torch.Tensor):
                held.add(_storage(pair.mine))
                if is_new:
                    self._derived.append(pair.mine)
                if (is_new or _storage(pair.mine) in weights) and _fits(pair) not in places:
                    places.add(_fits(pair))
                    self._copies.append((pair.theirs, pair.mine))
            elif isinstance(pair.mine, float):
                if at.get(pair.path, ABSENT) is not pair.mine and pair.mine != pair.theirs:
                    self._hands.append(_replaceable(pair))
            elif is_new and not isinstance(pair.mine, _NO_WEIGHT) and not (pair.has_parts and pair.are_alike):
                self._hands.append(_replaceable(pair))
        reached = {_storage(live) for live, _ in self._copies} | {_storage(shared) for shared in _slots(self._spare)}
        for name, parameter in self._live.named_parameters():
            if parameter.numel() and _storage(parameter) not in reached:
                raise StagingRefused(f"the engine's {name} has no counterpart in the staged model; {_ADVICE}")

        # Free loaded data that the engine has replaced by another layout. The next stream allocates this memory again.
        for _, data, _ in self._loadable:
            if _storage(data) not in held:
                data.untyped_storage().resize_(0)

    def _swap(self) -> None:
        # Tensors that were created in inference mode can be written to only in inference mode.
        with torch.inference_mode():
            for live, staged in self._copies:
                live.copy_(staged, non_blocking=True)
        for hand in self._hands:
            hand()
        if self._in_host:
            self._finish(self._live)


class LiveModel(StagedWeights):
    """Loads weights over the live weights of ``model``. The model must not compute anything during the load.

    ``finish`` derives values from loaded weights, as for `StagedModel`.
    """

    def __init__(self, model: nn.Module, finish: Callable[[nn.Module], None]) -> None:
        self._model, self._finish = model, finish
        self._loaded: set[str] = set()

    def _begin(self) -> None:
        self._loaded = set()
        fill_with_nan(self._model)

    def _load(self, weights: NamedTensors) -> None:
        with torch.inference_mode():
            self._loaded |= self._model.load_weights(weights) or set()

    def _find_problem(self) -> str | None:
        return find_incomplete(self._model, self._loaded)

    def _derive(self) -> None:
        self._finish(self._model)

    def _swap(self) -> None:
        """Do nothing, because the weights are live already."""


def wide_parameters(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the names of the floating-point parameters whose dtype has more bytes per element than ``dtype``."""
    parameters = model.named_parameters()
    return [name for name, found in parameters if found.is_floating_point() and found.dtype.itemsize > dtype.itemsize]


def pin(model: nn.Module) -> None:
    """Pin the host memory of a model's parameters, so that they can be copied to an accelerator asynchronously."""
    for parameter in model.parameters():
        parameter.data = parameter.data.pin_memory()


def fill_with_nan(model: nn.Module) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))


def find_incomplete(model: nn.Module, loaded: Collection[str]) -> str | None:
    """Return a text that names an incomplete parameter of ``model``, or None if all parameters are complete.

    A floating-point parameter is incomplete if it contains NaN, and any other parameter if its name is not in
    ``loaded``.
    """
    parameters = dict(model.named_parameters())
    # A sum is NaN if any element is NaN, and needs no memory for a mask. Read all results from the device at once,
    # because each read waits for the device.
    sums = {name: parameter.sum() for name, parameter in parameters.items() if parameter.is_floating_point()}
    are_nan = torch.stack([found.isnan() for found in sums.values()]).tolist() if sums else []
    missing = [name for name, is_nan in zip(sums, are_nan, strict=True) if is_nan]
    missing += parameters.keys() - sums.keys() - set(loaded)
    if not missing:
        return None
    return f"{len(missing)} parameters of the model are incomplete or NaN, among them {missing[0]}"


# Values of these types are counters and other state of a running engine, which a swap must not change.
_NO_WEIGHT = (int, str, type(None))


def _slots(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _fits(pair: Pair) -> tuple[Any, ...]:
    """Return the address and layout of a pair's live tensor.

    Raises:
        StagingRefused: the pair's staged tensor has another shape or dtype than the live one.
    """
    live = pair.theirs
    if not isinstance(live, torch.Tensor) or (live.shape, live.dtype) != (pair.mine.shape, pair.mine.dtype):
        raise StagingRefused(
            f"the engine's {pair.path} does not fit its live counterpart in shape and dtype; {_ADVICE}"
        )
    return live.data_ptr(), live.shape, live.stride(), live.dtype


def _replaceable(pair: Pair) -> Callable[[], None]:
    """Return a function that puts an object of the staged model in the place of its counterpart in the live model.

    Raises:
        StagingRefused: the object cannot be assigned.
    """
    if pair.put_theirs is None or pair.has_parts or not pair.are_alike:
        raise StagingRefused(f"the engine's {pair.path} cannot be assigned to the live model; {_ADVICE}")
    return functools.partial(pair.put_theirs, pair.mine)


_ADVICE = "this engine's weights can only be loaded in place: set async_training.weights.staging=none"
LOADED_IN_PLACE_ONLY = (
    "weights of a quantized engine, or of one with a draft model, can only be loaded in place; set "
    "async_training.weights.staging=none"
)

# SPDX-License-Identifier: Apache-2.0
"""Staging of weights in a second instance of the model, in the vLLM engine's own process.

Contract: that of `recipe.async_engine.weights.staged`. Weights are loaded on a separate thread while the engine
generates.

To find out whether the weights are complete, all floating-point parameters are filled with NaN when a stream starts; a
parameter that still contains NaN at its end is incomplete. (The names that vLLM's loaders return do not suffice: a
packed parameter is named as soon as one of its components is loaded.) Weights that are themselves NaN are therefore
refused too.

The second instance is created once. vLLM's own loaders fill it, and the values that vLLM derives from loaded weights
(packed layers, for example) are computed there, also while the engine generates. A swap copies into the live tensors in
place, so that every reference to them sees the new values: objects that are no modules (a router's bias, an attention
backend's sinks), views, captured CUDA graphs, and compiled code. To find the tensors to copy, both instances are walked
through in parallel (`recipe.async_engine.weights.held`): copied are parameters, buffers, all tensors that share their
storage, and each tensor that vLLM has derived. A derived object that is not a tensor (a kernel's own packed format) is
assigned to the live instance. If a tensor has no counterpart of the same shape and dtype, the version is refused before
the swap.

If the device has no memory for a second instance, it is in host memory: the swap copies parameters and buffers from
there, and vLLM derives the other values again from the live weights during the swap.

Shown by tests/integration/test_staged_model.py; in the real engine by test_staged_architectures.py and
tests/e2e/test_fully_async.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recipe.async_engine.weights.held import ABSENT, Pair, pairs
from recipe.async_engine.weights.staged import NamedTensors, StagedWeights, StagingRefused


class StagedModel(StagedWeights):
    """The staging area for the full weights of a model.

    Args:
        live: the instance with which the engine generates.
        spare: another instance of the same model, without weights.
        finish: the engine's function that derives values in an instance from its loaded weights; it is called again
            for every version.
        in_host: ``spare`` is in host memory, so values can be derived only in ``live``, after the swap.
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
        # Remember the tensors into which loaders write, because deriving values may replace them in the model.
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
        for parameter in self._spare.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))
        # Start from the live values of buffers, because the stream may not contain them.
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
        parameters = dict(self._spare.named_parameters())
        # A sum is NaN if any element is NaN, and needs no extra memory. All sums are read from the device together.
        sums = {name: parameter.sum() for name, parameter in parameters.items() if parameter.is_floating_point()}
        are_nan = torch.stack([found.isnan() for found in sums.values()]).tolist() if sums else []
        missing = [name for name, is_nan in zip(sums, are_nan, strict=True) if is_nan]
        missing += parameters.keys() - sums.keys() - self._loaded
        if not missing:
            return None
        return f"{len(missing)} parameters of the model did not come as a whole, or are NaN; among them {missing[0]}"

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
                raise StagingRefused(f"the engine's {name} exists in only one instance of its model; {_ADVICE}")

        # Free loaded data that vLLM has replaced by another layout; the next stream allocates the memory again.
        for _, data, _ in self._loadable:
            if _storage(data) not in held:
                data.untyped_storage().resize_(0)

    def _swap(self) -> None:
        # Enter inference mode, because tensors created in inference mode can be written to only in inference mode.
        with torch.inference_mode():
            for live, staged in self._copies:
                live.copy_(staged, non_blocking=True)
        for hand in self._hands:
            hand()
        if self._in_host:
            self._finish(self._live)


# Values of these types are counters and state of a running engine, which a swap must not reset.
_NO_WEIGHT = (int, str, type(None))


def _slots(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _fits(pair: Pair) -> tuple[Any, ...]:
    """Return address and layout of a pair's live tensor; raise StagingRefused if its shape or dtype differs."""
    live = pair.theirs
    if not isinstance(live, torch.Tensor) or (live.shape, live.dtype) != (pair.mine.shape, pair.mine.dtype):
        raise StagingRefused(f"the engine's {pair.path} does not fit its live counterpart; {_ADVICE}")
    return live.data_ptr(), live.shape, live.stride(), live.dtype


def _replaceable(pair: Pair) -> Callable[[], None]:
    """Return a function that assigns an object to the live model; raise StagingRefused if that is impossible."""
    if pair.put_theirs is None or pair.has_parts or not pair.are_alike:
        raise StagingRefused(f"the engine's {pair.path} cannot be assigned to the live model; {_ADVICE}")
    return functools.partial(pair.put_theirs, pair.mine)


_ADVICE = "its weights can only be loaded in place: set async_training.weights.staging=none"

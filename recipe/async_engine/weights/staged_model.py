# SPDX-License-Identifier: Apache-2.0
"""A second set of weights beside those that vLLM generates with, in the engine's own process.

Contract: that of `recipe.async_engine.weights.staged`. Loading goes on beside generation, on a thread of its own.

Whether every part came is seen by NaN: all floating-point parameters are filled with it as a stream starts, and one in
which some is left is not complete. (What vLLM's loaders report as loaded says too little: the name of a packed
parameter stands for any of its parts.) So weights that are NaN themselves are refused as well.

The second set is a second instance of the model, made once: vLLM's own loaders fill it, and what vLLM derives from the
loaded weights (packed layers, say) is derived beside generation too. A swap exchanges the two instances' parameters,
buffers and derived attributes module by module, which moves no data. Where captured graphs hold the addresses of the
live tensors, it copies instead. Where the device has no room for a second set, the second instance is in host memory:
then it is copied as well, and what vLLM derives is derived again from the live weights, within the swap.

Shown by tests/integration/test_staged_model.py and, in the real engine, tests/e2e/test_fully_async.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recipe.async_engine.weights.staged import NamedTensors, StagedWeights


class StagedModel(StagedWeights):
    """See the module's contract.

    Args:
        live: the model that generates.
        spare: another instance of it.
        finish: what the engine does to a model whose weights have been loaded.
        copies: swap by copying into the live tensors, whose addresses stay.
        in_host: the other instance is in host memory, so that nothing derived from its weights is of use.
    """

    def __init__(
        self,
        live: nn.Module,
        spare: nn.Module,
        finish: Callable[[nn.Module], None],
        copies: bool,
        in_host: bool = False,
    ) -> None:
        self._live, self._spare = live, spare
        self._finish = finish
        self._copies, self._in_host = copies or in_host, in_host
        self._loaded: set[str] = set()
        self._derived: dict[str, set[str]] = {}

    def _begin(self) -> None:
        self._loaded = set()
        for parameter in self._spare.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))
        # What the stream does not bring stays as it is.
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

    def _lack(self) -> str | None:
        parameters = dict(self._spare.named_parameters())
        # A sum is NaN if a term is, and needs no memory of its own. All are read from the device at once.
        sums = {name: parameter.sum() for name, parameter in parameters.items() if parameter.is_floating_point()}
        are_nan = torch.stack([found.isnan() for found in sums.values()]).tolist() if sums else []
        missing = [name for name, is_nan in zip(sums, are_nan, strict=True) if is_nan]
        missing += parameters.keys() - sums.keys() - self._loaded
        if not missing:
            return None
        return f"{len(missing)} parameters of the model did not come as a whole, or are NaN; among them {missing[0]}"

    def _derive(self) -> None:
        if self._in_host:
            return
        before = {name: dict(vars(module)) for name, module in self._spare.named_modules()}
        self._finish(self._spare)
        for name, module in self._spare.named_modules():
            changed = {key for key, value in vars(module).items() if before[name].get(key, _NOTHING) is not value}
            self._derived.setdefault(name, set()).update(changed)

    def _swap(self) -> None:
        spares = dict(self._spare.named_modules(remove_duplicate=False))
        for name, live in self._live.named_modules():
            spare = spares[name]
            if spare is live:
                continue  # vLLM shares modules without weights of their own between models
            derived = self._derived.get(name, set())
            for slots, others, names in (
                (live._parameters, spare._parameters, live._parameters.keys() | spare._parameters.keys()),
                (live._buffers, spare._buffers, live._buffers.keys() | spare._buffers.keys()),
                (live.__dict__, spare.__dict__, derived),
            ):
                for key in names:
                    self._swap_one(slots, others, key)
        if self._in_host:
            self._finish(self._live)

    def _swap_one(self, slots: dict[str, Any], others: dict[str, Any], key: str) -> None:
        mine, theirs = slots.pop(key, _NOTHING), others.pop(key, _NOTHING)
        if self._copies and isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            mine.copy_(theirs)
            mine, theirs = theirs, mine
        if theirs is not _NOTHING:
            slots[key] = theirs
        if mine is not _NOTHING:
            others[key] = mine


_NOTHING = object()

# SPDX-License-Identifier: Apache-2.0
"""A second set of weights beside those that an engine generates with, in the engine's own process.

Contract: until :meth:`StagedModel.swap` nothing of the live model changes, and after it nothing of the old weights is
left. A stream that lacks a parameter of the model, or a part of one, is not complete and cannot be swapped in; neither
can one in which loading a tensor failed. The next stream starts afresh. Loading needs no part of the live model, so it
goes on beside generation, on a thread of its own.

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

from recipe.async_engine.core.errors import RecipeError

NamedTensors = list[tuple[str, torch.Tensor]]


class StagingRefused(RecipeError):
    """The staged weights cannot become the live ones; those stay as they are."""


class StagedModel:
    """See the module's contract. One thread at a time calls it.

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
        self.version: int | None = None
        """Of the staged weights, once they are complete."""

    @torch.no_grad()
    def begin(self) -> None:
        """A stream starts; whatever was staged before and not swapped in is dropped."""
        self.version = None
        self._loaded = set()
        for parameter in self._spare.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))
        # What the stream does not bring stays as it is.
        live = dict(self._live.named_buffers())
        for name, buffer in self._spare.named_buffers():
            if buffer is not live[name]:
                buffer.copy_(live[name])

    @torch.no_grad()
    def load(self, weights: NamedTensors) -> None:
        """Take tensors of the stream, by the names of the model's files; they are valid during this call only."""
        buffers = dict(self._spare.named_buffers())
        parameters = []
        for name, tensor in weights:
            if name in buffers:
                buffers[name].copy_(tensor)
            else:
                parameters.append((name, tensor))
        self._loaded |= self._spare.load_weights(parameters) or set()

    @torch.no_grad()
    def complete(self, version: int) -> None:
        """The stream has ended.

        Raises:
            StagingRefused: a parameter of the model, or a part of one, never came.
        """
        missing = [name for name, parameter in self._spare.named_parameters() if not self._came(name, parameter)]
        if missing:
            raise StagingRefused(
                f"{len(missing)} parameters of the model did not come as a whole with version {version}, or are NaN; "
                f"among them {missing[0]}"
            )
        self.version = version
        if self._in_host:
            return
        before = {name: dict(vars(module)) for name, module in self._spare.named_modules()}
        self._finish(self._spare)
        for name, module in self._spare.named_modules():
            changed = {key for key, value in vars(module).items() if before[name].get(key, _NOTHING) is not value}
            self._derived.setdefault(name, set()).update(changed)

    def _came(self, name: str, parameter: torch.Tensor) -> bool:
        if not parameter.is_floating_point():
            return name in self._loaded
        # A sum is NaN if a term is, and needs no memory of its own.
        return not bool(parameter.sum().isnan())

    @torch.no_grad()
    def swap(self, version: int) -> None:
        """Make the staged weights the live ones. Nothing may be computed meanwhile.

        Raises:
            StagingRefused: this version is not staged as a whole.
        """
        if self.version != version:
            raise StagingRefused(f"version {version} is not staged; {self.version} is")
        self.version = None
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

# SPDX-License-Identifier: Apache-2.0
"""Pairs the values that two models of the same structure have in the same places: in modules, kernels, closures, etc.

Staging uses the pairs to copy the tensors of a spare model to the live model. Contract: :func:`pairs` yields every
value that can be reached from the first model through attributes, items and closures, together with the value that the
second model has at the same path. It visits the contents of each object once. It does not visit them if both models
share the object, if the two values differ in type, or if the object has a `__del__` method or an extension type.
Therefore it terminates, and does not enter configurations, process groups or registries of the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

ABSENT = object()
Put = Callable[[Any, Any], None] | None


class Pair(NamedTuple):
    """The values of two models at the same path: ``mine`` of the first model, and ``theirs`` of the second.

    ``theirs`` is `ABSENT` if the second model has no value at the path.
    """

    path: str
    mine: Any
    theirs: Any
    has_parts: bool
    """Whether ``mine`` contains values, which `pairs` visits too if ``mine`` and ``theirs`` are alike."""
    put_mine: Callable[[Any], None] | None
    """Function that replaces the value at this path in the first model, or None if it cannot be replaced."""
    put_theirs: Callable[[Any], None] | None

    @property
    def is_shared(self) -> bool:
        return self.mine is self.theirs

    @property
    def are_alike(self) -> bool:
        """Whether both values have the same type or, if they are functions, the same code."""
        if isinstance(self.mine, FunctionType) and isinstance(self.theirs, FunctionType):
            return self.mine.__code__ is self.theirs.__code__
        return type(self.mine) is type(self.theirs)


def pairs(mine: nn.Module, theirs: nn.Module) -> Iterator[Pair]:
    """Yield every value that ``mine`` holds, paired with the value of ``theirs`` at the same path."""
    modules = dict(theirs.named_modules(remove_duplicate=False))
    waiting: list[tuple[str, Any, Any]] = [(name, module, modules[name]) for name, module in mine.named_modules()]
    known = {id(module) for _, module, _ in waiting}
    while waiting:
        path, holder, other = waiting.pop()
        if holder is other:
            continue
        (held, put_mine), (others, put_theirs) = _held(holder), _held(other)
        for key, value in list(held.items()):
            pair = Pair(
                f"{path}.{key}",
                value,
                others.get(key, ABSENT),
                _parts(value) is not None,
                put_mine and functools.partial(put_mine, key),
                put_theirs and functools.partial(put_theirs, key),
            )
            yield pair
            if pair.has_parts and pair.are_alike and id(value) not in known:
                known.add(id(value))
                waiting.append((pair.path, value, pair.theirs))


def _held(holder: Any) -> tuple[dict[Any, Any], Put]:
    found = _parts(holder)
    assert found is not None, "only values with parts are visited"
    return found


def _parts(holder: Any) -> tuple[dict[Any, Any], Put] | None:
    """Return the values that an object contains, by name or index, and a function that replaces one of these values.

    The function is None if the values cannot be replaced. The whole result is None if `pairs` must not visit the
    object's contents.
    """
    if isinstance(holder, dict):
        return holder, holder.__setitem__
    if isinstance(holder, list):
        return dict(enumerate(holder)), holder.__setitem__
    if isinstance(holder, tuple):
        return dict(enumerate(holder)), None
    if isinstance(holder, FunctionType):
        cells = dict(zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True))
        filled = {name: cell.cell_contents for name, cell in cells.items() if _is_filled(cell)}
        defaults = {"defaults": holder.__defaults__, "kwdefaults": holder.__kwdefaults__}

        def put(name: str, value: Any) -> None:
            cells[name].cell_contents = value

        return filled | defaults, put
    if isinstance(holder, MethodType):
        return {"self": holder.__self__, "func": holder.__func__}, None
    if isinstance(holder, functools.partial):
        return {"func": holder.func, "args": holder.args, "keywords": holder.keywords}, None
    if isinstance(holder, (torch.Tensor, type, ModuleType)) or hasattr(type(holder), "__del__"):
        return None
    slots = [name for kind in type(holder).__mro__ for name in _names(kind) if hasattr(holder, name)]
    if slots:
        held = {name: getattr(holder, name) for name in slots} | getattr(holder, "__dict__", {})
        return held, functools.partial(object.__setattr__, holder)
    if hasattr(holder, "__dict__"):
        return vars(holder), vars(holder).__setitem__
    return None


def _names(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    named = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in named if not name.startswith("__"))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018, an empty cell raises ValueError
    except ValueError:
        return False
    return True

# SPDX-License-Identifier: Apache-2.0
"""Functions that this package's checkpoint engines share."""

import gc
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from recipe.async_engine.core.errors import SettingError

T = TypeVar("T")


def deadlines(backend: str, timeout_s: float, connect_timeout_s: float) -> tuple[float, float]:
    """Return the time limits (seconds) of a whole sync and of connecting; raise SettingError if one is not above 0."""
    for setting, value in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s)):
        if not value > 0:
            raise SettingError(f"checkpoint_engine.engine_kwargs.{backend}.{setting}", value, "above 0 (seconds)")
    return float(timeout_s), min(float(connect_timeout_s), float(timeout_s))


def consume(weights: Iterable[Any]) -> None:
    """Iterate over the weights to the end, because gathering each tensor may be a collective of all trainer ranks."""
    for _ in weights:
        continue


def on_this_device(call: Callable[[], T]) -> Callable[[], T]:
    """Return ``call`` for use on another thread, with this thread's current accelerator selected there."""
    if not torch.accelerator.is_available():
        return call
    device = torch.accelerator.current_device_index()

    def run() -> T:
        torch.accelerator.set_device_index(device)
        return call()

    return run


class CycleCollector:
    """Frees the buckets of failed weight syncs.

    Reference cycles with the error and its waiters keep these buckets alive. Python's own garbage collector would free
    the buckets only later, and never in an idle process.
    """

    def __init__(self) -> None:
        self._looks = 0

    def add(self) -> None:
        """Record a failed sync. The error may stay referenced for a while, so the next two `clear` calls collect."""
        self._looks = 2

    def clear(self) -> None:
        """Collect garbage if a sync failed recently; called at the end of every sync."""
        if self._looks:
            self._looks -= 1
            gc.collect()

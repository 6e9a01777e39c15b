# SPDX-License-Identifier: Apache-2.0
"""Functions for all of this package's checkpoint engines."""

import gc
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from recipe.async_engine.core.errors import SettingError

T = TypeVar("T")


def deadlines(backend: str, timeout_s: float, connect_timeout_s: float) -> tuple[float, float]:
    """Return the limits in seconds for a whole sync and for connecting; raise SettingError if a limit is not above 0.

    ``backend`` is the name of the checkpoint engine, for the error.
    """
    for setting, value in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s)):
        if not value > 0:
            raise SettingError(f"checkpoint_engine.engine_kwargs.{backend}.{setting}", value, "above 0 (seconds)")
    return float(timeout_s), min(float(connect_timeout_s), float(timeout_s))


def consume(weights: Iterable[Any]) -> None:
    """Iterate over ``weights`` to the end: other ranks may wait for this one, because gathering a tensor may be a
    collective of all trainer ranks.
    """
    for _ in weights:
        continue


def on_this_device(call: Callable[[], T]) -> Callable[[], T]:
    """Return a function for another thread: it selects the accelerator that this thread uses now, and runs ``call``."""
    if not torch.accelerator.is_available():
        return call
    device = torch.accelerator.current_device_index()

    def run() -> T:
        torch.accelerator.set_device_index(device)
        return call()

    return run


class CycleCollector:
    """Frees the buckets (send and receive buffers) of failed weight syncs.

    The error of a failed sync is part of reference cycles that keep the buckets alive. Python's own garbage collector
    would free the buckets only later, and never in an idle process.
    """

    def __init__(self) -> None:
        self._looks = 0

    def add(self) -> None:
        """Record a failed sync, so that the next two calls of `clear` collect garbage.

        One call would not suffice, because the error may still be referenced when the first one runs.
        """
        self._looks = 2

    def clear(self) -> None:
        """Collect garbage if a sync failed recently. Checkpoint engines call this at the end of every sync."""
        if self._looks:
            self._looks -= 1
            gc.collect()

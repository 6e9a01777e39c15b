# SPDX-License-Identifier: Apache-2.0
"""What our checkpoint engines have in common."""

import gc
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from recipe.async_engine.core.errors import SettingError

T = TypeVar("T")


def deadlines(backend: str, timeout_s: float, connect_timeout_s: float) -> tuple[float, float]:
    """Seconds for a sync and for connecting, which is a part of it; SettingError if one is not above 0."""
    for setting, value in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s)):
        if not value > 0:
            raise SettingError(f"checkpoint_engine.engine_kwargs.{backend}.{setting}", value, "above 0 (seconds)")
    return float(timeout_s), min(float(connect_timeout_s), float(timeout_s))


def go_through(weights: Iterable[Any]) -> None:
    """Take them to the end, sent or not: a collective of all trainer ranks may gather each, and all must call it."""
    for _ in weights:
        continue


def on_this_device(call: Callable[[], T]) -> Callable[[], T]:
    """``call`` for another thread, with the accelerator that is this one's; without accelerators, as it is."""
    if not torch.accelerator.is_available():
        return call
    device = torch.accelerator.current_device_index()

    def run() -> T:
        torch.accelerator.set_device_index(device)
        return call()

    return run


class Remains:
    """What failed syncs leave in this process: an error and who waited for it hold each other, and the buckets too.

    They would stay until Python looks for cycles by itself, which an idle process does not.
    """

    def __init__(self) -> None:
        self._looks = 0

    def add(self) -> None:
        """A sync has failed. Who uses the engine may have its error a while longer than the sync lasts."""
        self._looks = 2

    def clear(self) -> None:
        """A sync has ended, here and elsewhere."""
        if self._looks:
            self._looks -= 1
            gc.collect()

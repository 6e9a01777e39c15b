# SPDX-License-Identifier: Apache-2.0
"""Which accelerator a thread works on: each thread has a current one of its own."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def on_this_device(call: Callable[[], T]) -> Callable[[], T]:
    """``call`` for another thread, with the accelerator that is this one's; without accelerators, as it is."""
    if not torch.accelerator.is_available():
        return call
    device = torch.accelerator.current_device_index()

    def run() -> T:
        torch.accelerator.set_device_index(device)
        return call()

    return run

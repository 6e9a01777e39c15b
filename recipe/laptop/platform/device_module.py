# SPDX-License-Identifier: Apache-2.0
"""The device module of verl's CPU platform: ``torch.cpu``, and functions that otherwise only ``torch.cuda`` has.

verl calls functions of the device module for memory, caches and random state, without checking that they exist (for
example verl/workers/engine_workers.py:219, verl/utils/profiler/performance.py:49, verl/utils/checkpoint/
checkpoint_manager.py:208). The amount of memory is the host's. The counters of a caching allocator are 0, because the
CPU has no such allocator.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch.cpu import *  # noqa: F403


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing; this replaces functions that have no meaning on a CPU, such as emptying an allocator's cache."""


def _zero(*_: Any) -> int:
    return 0


empty_cache = ipc_collect = set_per_process_memory_fraction = nothing
reset_peak_memory_stats = reset_accumulated_memory_stats = nothing
memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _zero
manual_seed = manual_seed_all = torch.manual_seed


def mem_get_info(*_: Any) -> tuple[int, int]:
    """Return (available bytes, total bytes) of the host's memory."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def get_device_name(*_: Any) -> str:
    return "CPU"


def get_rng_state(*_: Any) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_: Any) -> None:
    torch.set_rng_state(state)

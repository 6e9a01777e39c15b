# SPDX-License-Identifier: Apache-2.0
"""Stands in for ``torch.cuda`` where verl asks its platform for the device module: ``torch.cpu`` and what it lacks.

verl calls memory, cache and random-state functions on the module without asking whether they exist (for example
verl/workers/engine_workers.py:219, verl/utils/profiler/performance.py:49, verl/utils/checkpoint/checkpoint_manager.py
:208). Memory answers are those of the host, counters of an allocator that does not exist are 0.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch.cpu import *  # noqa: F403


def nothing(*_: Any, **__: Any) -> None:
    """For what a host lacks: a caching allocator, its statistics, and handles of devices."""


def _zero(*_: Any) -> int:
    return 0


empty_cache = ipc_collect = set_per_process_memory_fraction = nothing
reset_peak_memory_stats = reset_accumulated_memory_stats = nothing
memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _zero
manual_seed = manual_seed_all = torch.manual_seed


def mem_get_info(*_: Any) -> tuple[int, int]:
    """Free and total bytes of the host."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def get_device_name(*_: Any) -> str:
    return "CPU"


def get_rng_state(*_: Any) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_: Any) -> None:
    torch.set_rng_state(state)

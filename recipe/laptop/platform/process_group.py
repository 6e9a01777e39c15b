# SPDX-License-Identifier: Apache-2.0
"""Joins a training worker to a process group on a machine whose device is the CPU.

verl builds the group's backend name as ``cpu:gloo,<device>:<backend>`` (verl/utils/distributed.py:89), which for the
CPU is ``cpu:gloo,cpu:gloo``; torch refuses a device that is named twice. verl's configuration accepts no other backend,
and verl skips the call only if a group exists, so this one function is wrapped to use ``cpu:gloo``.

The same call is the last thing that a training worker does before it asks for its engine
(verl/workers/engine_workers.py:89,136), so the CPU engines are registered here: importing them at ``import verl`` would
cost every process 15 s.
"""

from __future__ import annotations

import functools

import verl.utils.distributed as verl_distributed

BACKEND = "cpu:gloo"
_MARK = "_recipe_cpu_backend"


def install() -> None:
    """Wrap ``initialize_global_process_group_ray``, once, before any worker module imports it by name."""
    original = verl_distributed.initialize_global_process_group_ray
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        if backend is None:
            from recipe.laptop.platform import engines

            engines.register()
        original(timeout_second, backend or BACKEND)

    setattr(initialize_global_process_group_ray, _MARK, True)
    verl_distributed.initialize_global_process_group_ray = initialize_global_process_group_ray

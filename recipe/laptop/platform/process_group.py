# SPDX-License-Identifier: Apache-2.0
"""Wraps verl's function that initializes the global process group of a training worker, so that it works on a CPU.

verl composes the name of the group's backend as ``cpu:gloo,<device>:<backend>`` (verl/utils/distributed.py:89). On a
CPU the result is ``cpu:gloo,cpu:gloo``, and torch refuses a device that is named twice. verl has no setting for the
backend, so the wrapper passes ``cpu:gloo``.

The wrapper also registers the CPU engines, because verl calls the wrapped function just before a training worker looks
up its engine (verl/workers/engine_workers.py:89,136). If they were registered at ``import verl``, every process would
import them, which takes 15 s.
"""

from __future__ import annotations

import functools

import verl.utils.distributed as verl_distributed

BACKEND = "cpu:gloo"
_MARK = "_recipe_cpu_backend"


def install() -> None:
    """Install the wrapper of ``initialize_global_process_group_ray``, unless that was done already.

    Call this before any module imports that function by name.
    """
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

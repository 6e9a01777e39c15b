# SPDX-License-Identifier: Apache-2.0
"""Decides whether a run uses the CPU or a platform that verl chooses, and which environment variables a CPU run needs.

Only this package's own main programs call `choose_platform`, a pure function of its arguments. It chooses the CPU in
two cases: if the user asks for it, with VERL_PLATFORM=cpu or trainer.device=cpu (as in the CPU presets); or if this
machine has no accelerator and the run does not join a Ray cluster (whose accelerators may be on other nodes). Otherwise
verl chooses the platform.
"""

from __future__ import annotations

from collections.abc import Mapping

from recipe.async_engine.run.detect import LOG_LEVEL, Machine, PlatformChoice, cluster_to_join
from recipe.laptop import engines

CPU_ENVIRONMENT: dict[str, str] = {
    **LOG_LEVEL,
    "VERL_PLATFORM": "cpu",
    **engines.ENVIRONMENT,
    **engines.NO_USAGE_STATS,
    # A run has a dozen processes. If each of them started a thread per core, the threads would compete for the cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Do not compile: that takes seconds in each process, and models that are small enough for training on a CPU gain
    # nothing.
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def choose_platform(
    environ: Mapping[str, str], machine: Machine, ray_address: str | None = None, device: str | None = None
) -> PlatformChoice:
    """Return the platform of a run: the CPU, the one that VERL_PLATFORM names, or none if verl is to choose.

    Args:
        machine: result of `inspect_machine`.
        ray_address: value of `ray_kwargs.ray_init.address`.
        device: value of `trainer.device`.
    """
    asked = environ.get("VERL_PLATFORM", "").strip().lower() or ("cpu" if device == "cpu" else "")
    on_cpu = not (machine.accelerator or cluster_to_join(environ, machine, ray_address))
    if asked != "cpu" and (asked or not on_cpu):
        return PlatformChoice(asked or None)
    environment = {name: environ.get(name, value) for name, value in CPU_ENVIRONMENT.items()}
    return PlatformChoice("cpu", environment | {"VERL_PLATFORM": "cpu"})

# SPDX-License-Identifier: Apache-2.0
"""Decides whether a run uses the CPU or the platform that verl finds, and which environment variables a CPU run needs.

Only this package's mains call it; its plugin for verl does not choose. The CPU is chosen in two cases. Either the user
asks for it, with VERL_PLATFORM=cpu or trainer.device=cpu (as in the CPU presets). Or this machine has no accelerator
and the run would not join a Ray cluster; with a cluster, the driver may run on a node without a GPU. In all other cases
verl chooses, also if VERL_PLATFORM has another value. `choose_platform` is a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from recipe.async_engine.run.detect import LOG_LEVEL, Machine, PlatformChoice, cluster_to_join

CPU_ENVIRONMENT: dict[str, str] = {
    **LOG_LEVEL,
    "VERL_PLATFORM": "cpu",
    "VLLM_TARGET_DEVICE": "cpu",
    # The default "auto" would pin all vLLM workers of a machine to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A run has a dozen processes; with a thread per core in each, they would compete for the cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Compilation takes seconds in each process and does not speed up models small enough to train on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def choose_platform(
    environ: Mapping[str, str], machine: Machine, ray_address: str | None = None, device: str | None = None
) -> PlatformChoice:
    """Return the platform of a run.

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

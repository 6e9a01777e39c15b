# SPDX-License-Identifier: Apache-2.0
"""Chooses the platform of a run of this package's own mains, and the environment that its processes need for it.

Only a main calls this; the plugin never guesses. The CPU is chosen when the user asks for it (VERL_PLATFORM=cpu, or
trainer.device=cpu, as the presets for a CPU do), or when there is neither an accelerator on this machine nor a Ray
cluster that the run would join: the driver of a GPU cluster often runs on a node without a GPU. For any other value of
VERL_PLATFORM, and in all other cases, verl chooses. `choose_platform` is a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from recipe.async_engine.run.detect import LOG_LEVEL, Machine, PlatformChoice, cluster_to_join

CPU_ENVIRONMENT: dict[str, str] = {
    **LOG_LEVEL,
    "VERL_PLATFORM": "cpu",
    "VLLM_TARGET_DEVICE": "cpu",
    # "auto" would pin every vLLM worker of a machine to the same first cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A run has a dozen processes, which would compete for the cores if each had a thread per core.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Compiling costs seconds per process and gains nothing at the model sizes that a CPU trains.
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def choose_platform(
    environ: Mapping[str, str], machine: Machine, ray_address: str | None = None, device: str | None = None
) -> PlatformChoice:
    """Return the platform of a run, given the driver's environment, the result of `inspect_machine`, and two settings.

    Args:
        ray_address: `ray_kwargs.ray_init.address`.
        device: `trainer.device`.
    """
    asked = environ.get("VERL_PLATFORM", "").strip().lower() or ("cpu" if device == "cpu" else "")
    on_cpu = not (machine.accelerator or cluster_to_join(environ, machine, ray_address))
    if asked != "cpu" and (asked or not on_cpu):
        return PlatformChoice(asked or None)
    environment = {name: environ.get(name, value) for name, value in CPU_ENVIRONMENT.items()}
    return PlatformChoice("cpu", environment | {"VERL_PLATFORM": "cpu"})

# SPDX-License-Identifier: Apache-2.0
"""Which platform a run of this package's own mains takes, and the environment that its processes need for it.

Only a main asks; the plugin never guesses. The CPU is chosen when the user asks for it (VERL_PLATFORM=cpu, or
trainer.device=cpu, as the presets for a CPU do), or when there is neither an accelerator on this machine nor a Ray
cluster that the run would join: the driver of a GPU cluster often stands on a node without a GPU. Any other value of
VERL_PLATFORM, and everything else, is left to verl. `choose_platform` is a pure function of what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping

from recipe.async_engine.run.detect import LOG_LEVEL, Machine, PlatformChoice, cluster_to_join

CPU_ENVIRONMENT: dict[str, str] = {
    **LOG_LEVEL,
    "VERL_PLATFORM": "cpu",
    "VLLM_TARGET_DEVICE": "cpu",
    # "auto" pins every vLLM worker of a machine to the same first cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A run is a dozen processes; with a thread pool per core each they only take turns.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Compiling costs seconds per process and gains nothing at the sizes that a CPU trains.
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def choose_platform(
    environ: Mapping[str, str], machine: Machine, ray_address: str | None = None, device: str | None = None
) -> PlatformChoice:
    """The platform of a run by the driver's environment, what `inspect_machine` found, and two settings.

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

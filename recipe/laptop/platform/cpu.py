# SPDX-License-Identifier: Apache-2.0
"""The CPU as a platform of verl. This package's plugin for verl calls `install` if VERL_PLATFORM=cpu.

The platform is active only in processes that asked for the CPU. verl's auto-detection never chooses it, because the
head node of a GPU cluster often has no GPU itself. Each workaround states its reason; tests/contracts has the upstream
lines, and tests/integration/test_platform.py fails for each workaround that upstream no longer needs.

To keep ``import verl`` fast, this module imports little; the training engines are imported when a training worker
starts.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
import verl
from verl.plugin.platform import PlatformBase, PlatformRegistry

from recipe.async_engine.supported import VERL_SUPPORTED, require_version
from recipe.laptop.platform import device_module, process_group, vllm_distribution

PLATFORM_NAME = "cpu"
HCCL_ENGINE = "verl.checkpoint_engine.hccl_checkpoint_engine"


class PlatformCPU(PlatformBase):
    """verl's platform interface for a machine without an accelerator.

    A worker still takes one "GPU" from Ray, because verl counts only Ray's own accelerator resources
    (verl/single_controller/ray/base.py:226). A local run therefore starts Ray with as many pretended GPUs as it has
    workers (``ray_kwargs.ray_init.num_gpus``).
    """

    device_name = vendor_name = "cpu"
    device_module = device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # verl's auto-detection must not choose the CPU, even in a process where the plugin was loaded by mistake.
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == PLATFORM_NAME

    def current_device(self) -> str:
        # verl passes the result to torch.device() and Tensor.to(), which accept an index only for an accelerator.
        return "cpu"

    def device_count(self) -> int:
        return 1

    set_device = synchronize = empty_cache = set_allocator_settings = device_module.nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    profiler_start = profiler_stop = cudart = device_module.nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        # False makes verl's ServerAdapter pass weights to vLLM through shared memory.
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        defaults = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # Without this vLLM changes the executor "uni" to "mp", only to set OpenMP's variables, which are set above.
            # The asynchronous engine is still a separate process.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        return {name: os.environ.get(name, value) for name, value in defaults.items()}


def install() -> None:
    """Register the platform and apply its workarounds; must be called before verl looks for a device.

    Raises:
        WrongInstallation: the installed release of verl is not one for which the workarounds were written.
    """
    require_version("verl", verl.__version__, VERL_SUPPORTED, "The CPU platform")
    if PlatformRegistry.get(PLATFORM_NAME) is not PlatformCPU:
        PlatformRegistry.register(platform=PLATFORM_NAME)(PlatformCPU)
    vllm_distribution.install()
    process_group.install()
    # Set vLLM's own platform variable too, for processes that vLLM starts and that do not import verl.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    # In every training process verl imports this checkpoint engine for Ascend NPUs, which imports all of vLLM (2 s).
    # The entry None makes that import raise ImportError, which verl expects if an engine's hardware is absent.
    sys.modules.setdefault(HCCL_ENGINE, None)  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""The CPU as a verl platform. `install` is idempotent and is called by the plugin when VERL_PLATFORM=cpu.

Nothing here runs in a process that did not ask for the CPU: verl's auto-detection never finds the class, because the
head node of a GPU cluster often has no GPU itself. Each workaround says what it is for; tests/contracts has the
upstream lines, and tests/integration/test_platform.py fails for each one that upstream no longer needs.

Nothing heavier than ``import verl`` itself is imported here: the engines follow when a training worker starts.
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

    A worker still takes one "GPU" from Ray: verl counts only Ray's own accelerator resources
    (verl/single_controller/ray/base.py:226), so a local run starts Ray with as many as it has workers
    (``ray_kwargs.ray_init.num_gpus``).
    """

    device_name = vendor_name = "cpu"
    device_module = device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Auto-detection must never choose the CPU, even in a process where the plugin was loaded by mistake.
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
            # Otherwise vLLM turns the executor "uni" into "mp" in order to set OpenMP's variables, which are set here.
            # The asynchronous engine still has a process of its own.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        return {name: os.environ.get(name, value) for name, value in defaults.items()}


def install() -> None:
    """Register the platform and apply its workarounds, before anything in verl asks for a device.

    Raises WrongInstallation for another release of verl than the workarounds were written for.
    """
    require_version("verl", verl.__version__, VERL_SUPPORTED, "The CPU platform")
    if PlatformRegistry.get(PLATFORM_NAME) is not PlatformCPU:
        PlatformRegistry.register(platform=PLATFORM_NAME)(PlatformCPU)
    vllm_distribution.install()
    process_group.install()
    # vLLM's own platform setting, for the processes that it starts without verl.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    # verl imports this engine for Ascend NPUs in every training process, and it imports all of vLLM (2 s). None makes
    # the import raise ImportError, which verl expects of engines whose hardware is absent.
    sys.modules.setdefault(HCCL_ENGINE, None)  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""The CPU as a platform of verl. This package's plugin for verl calls `install` if VERL_PLATFORM=cpu.

verl's auto-detection never chooses this platform, because the head node of a GPU cluster often has no GPU itself.
tests/contracts lists, for each workaround, the lines of verl that make it necessary; tests/integration/test_platform.py
fails when verl no longer needs one. To keep ``import verl`` fast, this module does not import the training engines; a
training worker imports them when it starts.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
import verl
from verl.plugin.platform import PlatformBase, PlatformRegistry

from recipe.async_engine.supported import VERL_SUPPORTED, require_version
from recipe.laptop import engines
from recipe.laptop.platform import device_module, process_group

PLATFORM_NAME = "cpu"
HCCL_ENGINE = "verl.checkpoint_engine.hccl_checkpoint_engine"


class PlatformCPU(PlatformBase):
    """verl's platform interface for a machine without an accelerator.

    A worker still reserves a "GPU" from Ray, because verl counts only Ray's own accelerator resources
    (verl/single_controller/ray/base.py:226). So a local run starts Ray with as many fictitious GPUs as it has workers
    (``ray_kwargs.ray_init.num_gpus``).
    """

    device_name = vendor_name = "cpu"
    device_module = device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # verl calls this during auto-detection, which must choose the CPU only if the user has asked for it.
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == PLATFORM_NAME

    def current_device(self) -> str:
        # verl passes the result to torch.device() and Tensor.to(), which accept a device index only for an accelerator.
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
        # Because of this answer, verl's ServerAdapter passes weights to the engine through shared memory.
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        defaults = {"OMP_NUM_THREADS": "1", **engines.ENVIRONMENT, **engines.IN_ONE_PROCESS}
        return {name: os.environ.get(name, value) for name, value in defaults.items()}


def install() -> None:
    """Register the CPU platform, and apply the workarounds. Call this before verl looks for a device.

    Raise WrongInstallation if the workarounds were not written for the installed release of verl.
    """
    require_version("verl", verl.__version__, VERL_SUPPORTED, "The CPU platform")
    if PlatformRegistry.get(PLATFORM_NAME) is not PlatformCPU:
        PlatformRegistry.register(platform=PLATFORM_NAME)(PlatformCPU)
    engines.install()
    process_group.install()
    for name, value in engines.ENVIRONMENT.items():  # for processes of an engine that do not import verl
        os.environ.setdefault(name, value)
    # In every training process, verl imports its checkpoint engine for Ascend NPUs, which imports a rollout engine (2
    # s). With None in sys.modules, this import raises ImportError, which verl takes as a sign that the hardware is
    # absent.
    sys.modules.setdefault(HCCL_ENGINE, None)  # type: ignore[arg-type]

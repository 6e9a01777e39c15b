# SPDX-License-Identifier: Apache-2.0
"""An SGLang engine on the CPU that takes the time of an emulated accelerator.

Contract: as that of `benchmarks.emulation.engine`, except that in-place loads take no time of the device and that all
devices compute. SGLang loads this module as one of its plugins where `plugin` in this folder is on the path.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.emulation.devices import VARIABLE, Device, emulation


def install() -> None:
    """Make SGLang's schedulers take the device's time, if `EMULATED_DEVICES` is set."""
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    found = emulation()
    device = Device(found, "engine", found.replica_devices)

    def run_batch(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        device.end_if_due()
        prefills, decoding, context = [], 0, 0
        if batch.forward_mode.is_extend():
            prefills = list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
        else:
            decoding, context = batch.batch_size(), int(batch.seq_lens_cpu.sum())
        seconds = device.engine_step_s(decoding, context, prefills)
        with device.work("step", seconds, sequences=batch.batch_size()):
            return original(scheduler, batch, *args, **kwargs)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", run_batch, HookType.AROUND)

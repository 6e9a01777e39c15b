# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engine on the CPU, taking the time of an emulated accelerator for updates and log-probs.

Importing this module registers it for the vendor ``emulated`` of the device "cpu", which `Emulation.environment` makes
verl select. Training workers of any main import it with::

    actor_rollout_ref.model.external_lib=benchmarks.emulation.trainer
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl.utils import tensordict_utils as tensordicts
from verl.workers.engine import EngineRegistry

from benchmarks.emulation.devices import Device, emulation
from recipe.laptop.platform.engines import CPUFSDPEngineWithLMHead


@functools.cache
def device() -> Device:
    """Return this process's device."""
    found = emulation()
    return Device(found, "trainer", found.trainer_devices)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu", vendor="emulated")
class EmulatedEngine(CPUFSDPEngineWithLMHead):
    """One rank; it waits on the calling thread, as for a real device."""

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        found = lengths(data)
        answers = int(data["loss_mask"].sum())
        with device().work("update", device().times.update_s(found), tokens=sum(found), answer_tokens=answers):
            return super().train_batch(data if device().emulation.computes else least(data), loss_function)

    def infer_batch(self, data: Any, loss_function: Callable[..., Any] | None = None) -> Any:
        found = lengths(data)
        with device().work("log_probs", device().times.log_probs_s(found), tokens=sum(found)):
            return super().infer_batch(data, loss_function)


def least(data: Any) -> Any:
    """Return as few sequences of a batch as an update can have: the number that verl computes at once."""
    dynamic = tensordicts.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True)
    count = 1 if dynamic else int(data["micro_batch_size_per_gpu"])
    return tensordicts.index_select_tensor_dict(data, list(range(count)))


def lengths(data: Any) -> list[int]:
    """Return the number of tokens of each sequence in verl's nested batch."""
    return data["input_ids"].offsets().diff().tolist()

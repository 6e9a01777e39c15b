# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine on the CPU that takes the time of an emulated accelerator, selected by name::

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension

Contract: each step of the model runner takes as long as the device does for the scheduled tokens, in the engine's own
thread and process, so that neither an event loop nor another process waits with it. An in-place weight load also takes
the device's time, including sleep and wake-up if trainer and engine share accelerators, because vLLM has no sleep mode
on a CPU. The transfer time of weights that are staged beside generation is spent by the sender.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from benchmarks.emulation.devices import Device, emulation
from recipe.laptop.engines.engine_extension import CPUStagingExtension

_MARK = "_emulated"


@functools.cache
def device() -> Device:
    """Return this process's device."""
    found = emulation()
    return Device(found, "engine", found.replica_devices)


def step_s(scheduled: Any) -> tuple[float, int]:
    """Return (seconds, number of sequences) for what a `SchedulerOutput` has scheduled."""
    tokens = scheduled.num_scheduled_tokens
    prefills = [(tokens[request.req_id], request.num_computed_tokens) for request in scheduled.scheduled_new_reqs]
    decoding = context_tokens = 0
    running = scheduled.scheduled_cached_reqs
    for name, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
        if tokens[name] == 1:
            decoding, context_tokens = decoding + 1, context_tokens + computed
        else:
            prefills.append((tokens[name], computed))
    return device().engine_step_s(decoding, context_tokens, prefills), len(tokens)


def _timed(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return execute(self, scheduler_output, *args, **kwargs)
        device().end_if_due()
        seconds, sequences = step_s(scheduler_output)
        with device().work("step", seconds, sequences=sequences):
            return execute(self, scheduler_output, *args, **kwargs)

    setattr(execute_model, _MARK, True)
    return execute_model


def _no_forward(self: Any, *args: Any, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(positions.shape[-1], self.model_config.get_hidden_size(), dtype=self.dtype)


class EmulatedExtension(CPUStagingExtension):
    """The extension of the CPU platform, in an engine that takes a device's time."""

    def __new__(cls, **kwargs: Any) -> EmulatedExtension:
        if not hasattr(GPUModelRunner.execute_model, _MARK):
            GPUModelRunner.execute_model = _timed(GPUModelRunner.execute_model)
            if not device().emulation.computes:
                GPUModelRunner._model_forward = _no_forward
        return super().__new__(cls, **kwargs)

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> Any:
        with device().work("load", device().load_s()):
            return super().update_weights_from_ipc(*args, **kwargs)

# SPDX-License-Identifier: Apache-2.0
"""Estimates how long generation, training and transfers take on an accelerator, by a roofline model.

Contract: more work never takes less time. The time of a decode step is the larger of the times for its arithmetic and
for its memory traffic (the weights once, and the keys and values of every token in context). The times of prefill,
log-probs and updates follow from their FLOPs, and those of transfers from their bytes. A device profile has the
device's peak rates and the fractions of them that are reached in practice. Shown by tests/plan/test_device.py.

Sources of the profile `H100`:

- peaks: NVIDIA H100 SXM5 data sheet: 989.4 TFLOP/s in bfloat16 without sparsity, 80 GB at 3.35 TB/s; DGX H100 data
  sheet: one 400 Gb/s network port per accelerator (50 GB/s).
- `training_efficiency`: Megatron-LM's README reports 41% (2.1B) to 47% (462B) of peak for pre-training on H100, at 6
  FLOPs per parameter and token without recomputation, as in this module.
- all other efficiencies, `link_latency_s`, `step_overhead_s` and `update_overhead_s` are assumptions, not measured on a
  device. Before you rely on the seconds, fit the times to a run of your own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import pydantic.dataclasses
from pydantic import Field

from recipe.plan.memory.shape import ModelShape

# Bytes of memory traffic of AdamW per fp32 parameter: it reads weight, gradient and two moments (16), and writes all of
# these but the gradient (12).
OPTIMIZER_BYTES = 28


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Part = Annotated[float, Field(gt=0, le=1)]


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The peak rates of one accelerator, and the fractions of them that are reached in practice.

    Attributes:
        flops: FLOP/s in the dtype of the model.
        memory_bandwidth: bytes/s of device memory.
        link_bandwidth: bytes/s to an accelerator on another node.
        link_latency_s: seconds that each transfer takes regardless of its size.
        decode_efficiency: fraction of `memory_bandwidth` that decode steps reach.
        prefill_efficiency: fraction of `flops` that forward passes and the arithmetic of decode steps reach.
        training_efficiency: fraction of `flops` that updates reach.
        link_efficiency: fraction of `link_bandwidth` that transfers reach.
        step_overhead_s: additional seconds of each engine step for scheduling, kernel launches and sampling.
        update_overhead_s: additional seconds of each update for kernel launches and the gradient norm.
    """

    name: str
    flops: Positive
    memory_bandwidth: Positive
    link_bandwidth: Positive
    link_latency_s: NotNegative
    decode_efficiency: Part
    prefill_efficiency: Part
    training_efficiency: Part
    link_efficiency: Part
    step_overhead_s: NotNegative
    update_overhead_s: NotNegative


H100 = DeviceProfile(
    name="H100",
    flops=989.4e12,
    memory_bandwidth=3.35e12,
    link_bandwidth=50e9,
    link_latency_s=0.02,
    decode_efficiency=0.7,
    prefill_efficiency=0.5,
    training_efficiency=0.41,
    link_efficiency=0.8,
    step_overhead_s=0.002,
    update_overhead_s=0.05,
)

PROFILES = {"h100": H100}


def active_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that one token is multiplied by: layers, its experts, and the output head."""
    experts = shape.expert_parameters * shape.experts_per_token // shape.experts if shape.experts else 0
    return shape.layer_parameters + experts + shape.embedding


def read_parameters(shape: ModelShape, tokens: int) -> float:
    """Return the mean number of parameters that a forward pass over ``tokens`` tokens reads if routing is uniform."""
    read = float(shape.layer_parameters + shape.embedding)
    if shape.experts:
        read += shape.expert_parameters * (1.0 - (1.0 - shape.experts_per_token / shape.experts) ** tokens)
    return read


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Computes how long one model's operations take on the devices of a rollout replica or of the trainer.

    Attributes:
        devices: number of devices that divide the work evenly. Their communication is included in the efficiencies.
        weight_bytes: bytes of a parameter.
        cache_bytes: bytes of one number in the KV cache.
        token_scale: number of real tokens for which one token of the run stands. It is above 1 in a small test run
            whose answers have a few tokens instead of thousands.
        time_scale: factor by which all seconds are multiplied.
    """

    device: DeviceProfile
    shape: ModelShape
    devices: int = 1
    weight_bytes: int = 2
    cache_bytes: int = 2
    token_scale: int = 1
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("devices", "weight_bytes", "cache_bytes", "token_scale", "time_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"DeviceTimes.{name}={getattr(self, name)} is not allowed: it must be above 0.")

    @property
    def token_cache_bytes(self) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.shape.layers * self.shape.kv_width * self.cache_bytes

    @property
    def model_bytes(self) -> int:
        return self.shape.parameters * self.weight_bytes

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Return the seconds of a decode step of ``batch`` sequences that together have ``context_tokens`` tokens.

        With a `token_scale` of N, the result is the time of N such steps, with N times as many tokens in context.
        """
        if not batch:
            return 0.0
        context = context_tokens * self.token_scale
        moved = read_parameters(self.shape, batch) * self.weight_bytes + context * self.token_cache_bytes
        reading = moved / (self.device.memory_bandwidth * self.device.decode_efficiency)
        arithmetic = self._forward_flops(batch, context) / (self.device.flops * self.device.prefill_efficiency)
        step = max(reading, arithmetic) / self.devices + self.device.step_overhead_s
        return self.time_scale * self.token_scale * step

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Return the seconds of prefilling ``tokens`` tokens of a sequence after ``context_tokens`` cached tokens."""
        if not tokens:
            return 0.0
        tokens, context = tokens * self.token_scale, context_tokens * self.token_scale
        flops = self._forward_flops(tokens, tokens * context + tokens * tokens // 2)
        step = flops / (self.device.flops * self.device.prefill_efficiency * self.devices) + self.device.step_overhead_s
        return self.time_scale * step

    def log_probs_s(self, lengths: Iterable[int]) -> float:
        """Return the seconds of a forward pass over whole sequences with these lengths."""
        flops = sum(self._sequence_flops(length) for length in lengths)
        return self.time_scale * flops / (self.device.flops * self.device.prefill_efficiency * self.devices)

    def update_s(self, lengths: Iterable[int], optimizer_steps: int = 1) -> float:
        """Return the seconds of forward, backward (with twice the FLOPs) and AdamW for sequences with these lengths."""
        flops = 3 * sum(self._sequence_flops(length) for length in lengths)
        arithmetic = flops / (self.device.flops * self.device.training_efficiency)
        optimizer = optimizer_steps * OPTIMIZER_BYTES * self.shape.parameters / self.device.memory_bandwidth
        return self.time_scale * ((arithmetic + optimizer) / self.devices + self.device.update_overhead_s)

    def transfer_s(self, transferred: float | None = None, links: int = 1) -> float:
        """Return the seconds of sending ``transferred`` bytes (None: all weights) over ``links`` parallel links."""
        moved = self.model_bytes if transferred is None else transferred
        rate = self.device.link_bandwidth * self.device.link_efficiency * links
        return self.time_scale * (moved / rate + self.device.link_latency_s)

    def load_s(self) -> float:
        """Return the seconds of copying a replica's new weights within device memory (one read and one write)."""
        rate = self.device.memory_bandwidth * self.device.decode_efficiency * self.devices
        return self.time_scale * 2 * self.model_bytes / rate

    def _forward_flops(self, tokens: int, pairs: int) -> float:
        """Return the FLOPs of a forward pass over ``tokens`` tokens that attend to ``pairs`` tokens in total.

        These are 2 per parameter and token, plus 4 x layers x query width for each pair of a token and a token to which
        it attends.
        """
        return 2.0 * active_parameters(self.shape) * tokens + 4.0 * self.shape.layers * self.shape.q_width * pairs

    def _sequence_flops(self, length: int) -> float:
        tokens = length * self.token_scale
        return self._forward_flops(tokens, tokens * tokens // 2)

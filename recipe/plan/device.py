# SPDX-License-Identifier: Apache-2.0
"""Computes how long the work of a run takes on an accelerator, by a roofline model.

Contract: every time is a positive number of seconds that never shrinks when there is more to do. A decode step takes as
long as its arithmetic or its memory traffic (the weights once, and the keys and values of every token in context),
whichever takes longer. Prefill, log-probs and updates take as long as their arithmetic, and transfers as long as their
bytes take over a link. A device's profile has efficiencies: the part of its peaks that work reaches. Shown by
tests/plan/test_device.py.

Sources of `H100`:

- peaks: NVIDIA H100 SXM5 data sheet: 989.4 TFLOP/s in bfloat16 without sparsity, 80 GB at 3.35 TB/s; DGX H100 data
  sheet: one 400 Gb/s network port an accelerator (50 GB/s).
- `training_efficiency`: Megatron-LM's README reports 41% (2.1B) to 47% (462B) of peak for pre-training on H100, counted
  as here: 6 FLOPs a parameter and token, whatever is recomputed.
- all other efficiencies, `link_latency_s`, `step_overhead_s` and `update_overhead_s` are assumptions. Nothing here
  was measured on a device; fit the times to a run of yours before you rely on seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import pydantic.dataclasses
from pydantic import Field

from recipe.plan.memory.shape import ModelShape

# Bytes that AdamW moves for each parameter, in fp32: weight, gradient and two moments in, all but the gradient out.
OPTIMIZER_BYTES = 28


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Part = Annotated[float, Field(gt=0, le=1)]


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One accelerator: its peaks, and the part of them that work reaches.

    Attributes:
        flops: FLOP/s in the dtype of the model.
        memory_bandwidth: bytes/s of device memory.
        link_bandwidth: bytes/s to an accelerator on another node.
        link_latency_s: what each transfer takes, whatever its size.
        decode_efficiency: the part of `memory_bandwidth` that decode steps reach.
        prefill_efficiency: the part of `flops` that forward passes and the arithmetic of decode steps reach.
        training_efficiency: the part of `flops` that updates reach.
        link_efficiency: the part of `link_bandwidth` that transfers reach.
        step_overhead_s: what each engine step takes besides: scheduling, launches, sampling.
        update_overhead_s: what each update takes besides: launches, gradient norm.
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
    """Return the parameters that one token is multiplied with: its own experts, and the output head but no lookup."""
    experts = shape.expert_parameters * shape.experts_per_token // shape.experts if shape.experts else 0
    return shape.layer_parameters + experts + shape.embedding


def read_parameters(shape: ModelShape, tokens: int) -> float:
    """Return the parameters that a forward pass over ``tokens`` reads, if each token's experts are drawn evenly."""
    read = float(shape.layer_parameters + shape.embedding)
    if shape.experts:
        read += shape.expert_parameters * (1.0 - (1.0 - shape.experts_per_token / shape.experts) ** tokens)
    return read


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Seconds of one model's work on devices that work together: those of a replica, or of the trainer.

    Attributes:
        devices: how many divide the work evenly; the efficiencies include their communication.
        weight_bytes: the bytes of a parameter.
        cache_bytes: the bytes of a number in the cache of keys and values.
        token_scale: how many tokens one token of the run stands for. A small run has answers of a few tokens where
            real ones have thousands, and each of its decode steps then takes the time of so many steps.
        time_scale: all seconds are multiplied by it.
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
        """The bytes of one token's keys and values."""
        return 2 * self.shape.layers * self.shape.kv_width * self.cache_bytes

    @property
    def model_bytes(self) -> int:
        return self.shape.parameters * self.weight_bytes

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Return the seconds of a step that gives each of ``batch`` sequences a token.

        ``context_tokens`` is the number of tokens that all of them have before it. With a `token_scale` of N the step
        counts as N steps, with a context that is N times as long.
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
        """Return the seconds of reading ``tokens`` of one sequence that has ``context_tokens`` in the cache already."""
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
        """Return the seconds of training on whole sequences: forward, backward (twice as much) and AdamW."""
        flops = 3 * sum(self._sequence_flops(length) for length in lengths)
        arithmetic = flops / (self.device.flops * self.device.training_efficiency)
        optimizer = optimizer_steps * OPTIMIZER_BYTES * self.shape.parameters / self.device.memory_bandwidth
        return self.time_scale * ((arithmetic + optimizer) / self.devices + self.device.update_overhead_s)

    def transfer_s(self, transferred: float | None = None, links: int = 1) -> float:
        """Return the seconds of sending bytes, by default all weights, over a number of links side by side."""
        moved = self.model_bytes if transferred is None else transferred
        rate = self.device.link_bandwidth * self.device.link_efficiency * links
        return self.time_scale * (moved / rate + self.device.link_latency_s)

    def load_s(self) -> float:
        """Return the seconds in which a replica reads new weights once and writes them once in its own memory."""
        rate = self.device.memory_bandwidth * self.device.decode_efficiency * self.devices
        return self.time_scale * 2 * self.model_bytes / rate

    def _forward_flops(self, tokens: int, pairs: int) -> float:
        """Return 2 FLOPs per parameter and token, and 4 per attended pair of tokens, head dimension and layer."""
        return 2.0 * active_parameters(self.shape) * tokens + 4.0 * self.shape.layers * self.shape.q_width * pairs

    def _sequence_flops(self, length: int) -> float:
        tokens = length * self.token_scale
        return self._forward_flops(tokens, tokens * tokens // 2)

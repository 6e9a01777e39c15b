# SPDX-License-Identifier: Apache-2.0
"""How long the work of a run takes on an accelerator, by roofline.

Contract: every time is a positive number of seconds that never shrinks when there is more to do. A decode step takes
the longer of its arithmetic and its memory traffic (weights once, and the keys and values of every token in context);
prefill, log-probs and updates take their arithmetic; transfers take bytes over a link. What a device reaches of its
peaks is an efficiency of its profile. Shown by tests/plan/test_device.py.

Sources of `H100`:

- peaks: NVIDIA H100 SXM5 data sheet: 989.4 TFLOP/s in bfloat16 without sparsity, 80 GB at 3.35 TB/s; DGX H100 data
  sheet: one 400 Gb/s network port an accelerator (50 GB/s).
- `training_efficiency`: Megatron-LM's README reports 41% (2.1B) to 47% (462B) of peak for pre-training on H100, counted
  as here: 6 FLOPs a parameter and token, whatever is recomputed.
- all other efficiencies, `link_latency_s`, `step_overhead_s` and `update_overhead_s` are assumptions. Nothing here
  was measured on a device: fit them with a run of yours before you rely on seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from recipe.plan.memory.shape import ModelShape, shape_of

__all__ = ["H100", "DeviceProfile", "DeviceTimes", "ModelShape", "active_parameters", "shape_of"]

# Bytes of fp32 state that AdamW moves a parameter: weight, gradient and two moments in, all but the gradient out.
OPTIMIZER_BYTES = 28


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One accelerator: its peaks, and what part of them work reaches.

    Attributes:
        flops: FLOP/s in the dtype of the model.
        memory_bandwidth: bytes/s of device memory.
        link_bandwidth: bytes/s to an accelerator on another node.
        link_latency_s: of a transfer, whatever its size.
        decode_efficiency: of `memory_bandwidth` in decode steps.
        prefill_efficiency: of `flops` in forward passes (prefill, log-probs) and in the arithmetic of decode steps.
        training_efficiency: of `flops` in updates.
        link_efficiency: of `link_bandwidth`.
        step_overhead_s: of an engine step: scheduling, launches, sampling.
        update_overhead_s: of an update: launches, gradient norm.
    """

    name: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    link_latency_s: float
    decode_efficiency: float
    prefill_efficiency: float
    training_efficiency: float
    link_efficiency: float
    step_overhead_s: float
    update_overhead_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            if field.name.endswith("_s"):
                allowed, right = ">= 0", value >= 0
            elif field.name.endswith("_efficiency"):
                allowed, right = "above 0 and at most 1", 0 < value <= 1
            else:
                allowed, right = "above 0", value > 0
            if not right:
                raise ValueError(f"DeviceProfile.{field.name}={value} is not allowed: it must be {allowed}.")


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
    """Parameters that one token is multiplied with: k of E experts, and the output head but not the lookup."""
    experts = shape.expert_parameters * shape.experts_per_token // shape.experts if shape.experts else 0
    return shape.layer_parameters + experts + shape.embedding


def read_parameters(shape: ModelShape, tokens: int) -> float:
    """Parameters that a forward pass over so many tokens reads, if each token's experts are drawn evenly."""
    read = float(shape.layer_parameters + shape.embedding)
    if shape.experts:
        read += shape.expert_parameters * (1.0 - (1.0 - shape.experts_per_token / shape.experts) ** tokens)
    return read


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Seconds of one model's work on so many devices that work as one: a replica, or the trainer.

    Attributes:
        devices: work is divided evenly among them; what their communication costs is in the efficiencies.
        weight_bytes, cache_bytes: of a parameter and of a number in the cache of keys and values.
        token_scale: tokens for which one token of the run stands. A run on a small scale has answers of a few tokens
            where the real ones have thousands: each decode step then takes the time of that many.
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
        """Bytes of one token's keys and values."""
        return 2 * self.shape.layers * self.shape.kv_width * self.cache_bytes

    @property
    def model_bytes(self) -> int:
        return self.shape.parameters * self.weight_bytes

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Of one step that gives each of `batch` sequences a token; they have `context_tokens` in all before it.

        With a `token_scale` of N it is N steps: the run's token is N tokens, its context N times as long.
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
        """Of reading `tokens` of one sequence, of which `context_tokens` are in the cache already."""
        if not tokens:
            return 0.0
        tokens, context = tokens * self.token_scale, context_tokens * self.token_scale
        flops = self._forward_flops(tokens, tokens * context + tokens * tokens // 2)
        step = flops / (self.device.flops * self.device.prefill_efficiency * self.devices) + self.device.step_overhead_s
        return self.time_scale * step

    def log_probs_s(self, lengths: Iterable[int]) -> float:
        """Of the log-probs of whole sequences with these lengths: one forward pass."""
        flops = sum(self._sequence_flops(length) for length in lengths)
        return self.time_scale * flops / (self.device.flops * self.device.prefill_efficiency * self.devices)

    def update_s(self, lengths: Iterable[int], optimizer_steps: int = 1) -> float:
        """Of training on whole sequences with these lengths: forward, backward (twice as much) and AdamW."""
        flops = 3 * sum(self._sequence_flops(length) for length in lengths)
        arithmetic = flops / (self.device.flops * self.device.training_efficiency)
        optimizer = optimizer_steps * OPTIMIZER_BYTES * self.shape.parameters / self.device.memory_bandwidth
        return self.time_scale * ((arithmetic + optimizer) / self.devices + self.device.update_overhead_s)

    def transfer_s(self, transferred: float | None = None, links: int = 1) -> float:
        """Of sending so many bytes (the whole model's weights by default) over that many links side by side."""
        moved = self.model_bytes if transferred is None else transferred
        rate = self.device.link_bandwidth * self.device.link_efficiency * links
        return self.time_scale * (moved / rate + self.device.link_latency_s)

    def load_s(self) -> float:
        """Of a replica's taking of weights that have come: read once and written once in its own memory."""
        rate = self.device.memory_bandwidth * self.device.decode_efficiency * self.devices
        return self.time_scale * 2 * self.model_bytes / rate

    def _forward_flops(self, tokens: int, pairs: int) -> float:
        """Of `tokens` that attend to `pairs` tokens in all: 2 a parameter, and 4 a pair, head dimension and layer."""
        return 2.0 * active_parameters(self.shape) * tokens + 4.0 * self.shape.layers * self.shape.q_width * pairs

    def _sequence_flops(self, length: int) -> float:
        tokens = length * self.token_scale
        return self._forward_flops(tokens, tokens * tokens // 2)

# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine, its next weights and the buckets of a weight sync need of one accelerator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.model_shape import ModelShape
from recipe.async_engine.config.plan import replica_size
from recipe.async_engine.config.sections import SHARED, lookup
from recipe.plan.memory.engines import ROLLOUT, dtype_bytes, longest
from recipe.plan.memory.items import GIB, MIB, Item

BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
# What a vLLM engine keeps while it sleeps (context, graphs, NCCL): 0.8 GiB alone and 2.4 with tensor parallelism were
# reported (NVIDIA-NeMo/RL#223); any engine of several accelerators is taken to keep as much.
ASLEEP = {False: GIB, True: 5 * GIB // 2}


@dataclass(frozen=True, slots=True)
class Engine:
    """One accelerator of a rollout replica.

    Attributes:
        weights: of the model on it.
        share: of the device that vLLM takes for weights, KV cache and activations (`gpu_memory_utilization`).
        token_bytes: of a token's keys and values on it.
    """

    weights: int
    share: float
    token_bytes: int

    def cache_tokens(self, device: int) -> int:
        """Tokens that its KV cache has room for, if activations took nothing."""
        return max(0, int(self.share * device) - self.weights) // self.token_bytes


def rollout_engine(config: Mapping[str, Any], shape: ModelShape) -> Engine:
    tensor = int(lookup(config, f"{ROLLOUT}.tensor_model_parallel_size") or 1)
    ranks, item = replica_size(config), dtype_bytes(lookup(config, f"{ROLLOUT}.dtype", "bfloat16"), 2)
    # Experts are shared out over all ranks of a replica with expert parallelism, the rest is there once a tensor group.
    spread = ranks if int(lookup(config, f"{ROLLOUT}.expert_parallel_size") or 1) > 1 else tensor
    dense = shape.parameters - shape.expert_parameters
    # Of a tied embedding there is one copy, as in the model's files.
    weights = item * (dense // tensor + shape.expert_parameters // spread)
    heads = max(1, shape.kv_heads // tensor)
    own = standalone_share(config)
    share = own if own is not None else float(lookup(config, f"{ROLLOUT}.gpu_memory_utilization") or 0.5)
    return Engine(weights, share, 2 * shape.layers * heads * shape.head_dim * item)


def standalone_share(config: Mapping[str, Any]) -> float | None:
    """Of an accelerator that a replica has to itself, where it is set apart from `gpu_memory_utilization`."""
    share = lookup(config, f"{ROLLOUT}.standalone_gpu_memory_utilization")
    separate = lookup(config, "async_training.placement") != SHARED
    return float(share) if separate and isinstance(share, int | float) else None


def asleep(config: Mapping[str, Any]) -> Item:
    return Item("sleeping rollout engine", ASLEEP[replica_size(config) > 1], certain=False)


def bucket_bytes(config: Mapping[str, Any]) -> int:
    return int(lookup(config, BUCKET) or 2048) * MIB


def device_buckets(config: Mapping[str, Any], hands_over: bool) -> Item | None:
    """Buckets on each device that takes part in a weight sync; None where they are in host memory.

    Two at a member of the group, as verl's engines have them, and one more where the weights go on to another process.
    """
    if lookup(config, f"{ROLLOUT}.checkpoint_engine.backend") == "recipe_gloo":
        return None
    return Item("weight-sync buckets", (3 if hands_over else 2) * bucket_bytes(config))


def room(config: Mapping[str, Any], positions: int | None) -> int:
    """Tokens of the longest request that the engine has to have room for.

    ``positions``: the model's, which verl takes where `max_model_len` is null (vllm_async_server.py:1104).
    """
    return int(lookup(config, f"{ROLLOUT}.max_model_len") or 0) or positions or longest(config)

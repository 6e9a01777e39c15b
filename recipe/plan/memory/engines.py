# SPDX-License-Identifier: Apache-2.0
"""Computes how much memory each engine of a run needs on one accelerator, from the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.legacy import placement
from recipe.async_engine.config.log_prob_servers import LogProbServers
from recipe.async_engine.config.plan import adapter_rank, replica_size, teacher_size, teacher_tensor_size, trainer_ranks
from recipe.async_engine.config.problems import lookup
from recipe.async_engine.config.rules.parallel import Sizing, scoring, updating
from recipe.async_engine.config.sections import SHARED
from recipe.plan.memory.items import GIB, MIB, Item
from recipe.plan.memory.shape import ModelShape
from recipe.plan.memory.training import (
    FP32,
    FSDP,
    Megatron,
    Rank,
    Work,
    fsdp_rank,
    megatron_rank,
)

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF, CRITIC, SERVERS = "actor_rollout_ref.ref", "critic", "model_engine_server"
SIZES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
DEFAULT_TOKENS = 16384


def dtype_bytes(name: object, default: int = FP32) -> int:
    return SIZES.get(str(name), default)


def longest(config: Mapping[str, Any]) -> int:
    """Return the largest number of tokens that a prompt and its response may have together."""
    return int(lookup(config, "data.max_prompt_length") or 0) + int(lookup(config, "data.max_response_length") or 0)


def micro_batch_tokens(config: Mapping[str, Any], sizing: Sizing, shares: int) -> int:
    """Return the number of tokens of a micro-batch on one rank; each sequence is split over ``shares`` ranks."""
    if lookup(config, sizing.dynamic):
        return int(lookup(config, sizing.tokens) or DEFAULT_TOKENS)
    return int(lookup(config, sizing.rows) or 1) * longest(config) // shares


def actor_rank(config: Mapping[str, Any], shape: ModelShape) -> Rank:
    shares = sequence_shares(config, ACTOR)
    entropy = lookup(config, f"{ACTOR}.entropy_coeff") or lookup(config, f"{ACTOR}.calculate_entropy")
    update = Work(
        micro_batch_tokens(config, updating(ACTOR), shares),
        _logit_bytes(config, ACTOR, bool(entropy), differentiated=True),
        _recomputes(config, ACTOR),
    )
    forward = Work(
        micro_batch_tokens(config, scoring(ROLLOUT), shares), _logit_bytes(config, ACTOR, True, differentiated=False)
    )
    adapters = adapter_rank(config)
    return _rank(config, ACTOR, shape, update, forward, shape.lora_parameters(adapters) if adapters else None)


def reference_rank(config: Mapping[str, Any], shape: ModelShape) -> Rank:
    """Return the memory of a rank of the reference policy, which runs only forward passes."""
    tokens = micro_batch_tokens(config, scoring(REF), sequence_shares(config, ACTOR))
    forward = Work(tokens, _logit_bytes(config, REF, False, differentiated=False))
    return _rank(config, REF, shape, None, forward, None)


def critic_rank(config: Mapping[str, Any], shape: ModelShape) -> Rank:
    work = Work(
        micro_batch_tokens(config, updating(CRITIC), sequence_shares(config, CRITIC)), 0, _recomputes(config, CRITIC)
    )
    return _rank(config, CRITIC, shape, work, work, None)


def server_rank(config: Mapping[str, Any], servers: LogProbServers, shape: ModelShape) -> Rank:
    """Return the memory of a log-prob server's rank, which runs only forward passes."""
    section = f"{SERVERS}.engine"
    megatron = is_megatron(config, SERVERS)
    layout = _megatron(config, section, servers.ranks, None, False) if megatron else None
    copies = servers.ranks // (layout.tensor * layout.pipeline * layout.context) if layout else servers.ranks
    tokens = max(-(-servers.max_batch_tokens // max(copies, 1)), min(longest(config), servers.max_batch_tokens))
    forward = Work(tokens, _logit_bytes(config, SERVERS, True, differentiated=False))
    if layout is not None:
        return megatron_rank(shape, layout, None, forward)
    model_bytes = dtype_bytes(lookup(config, f"{section}.model_dtype"))
    return fsdp_rank(
        shape, FSDP(servers.ranks, model_bytes, _compute_bytes(config, section), trains=False), None, forward
    )


def is_megatron(config: Mapping[str, Any], section: str) -> bool:
    setting = "backend" if section == SERVERS else "strategy"
    return bool(lookup(config, f"{section}.{setting}") == "megatron")


def sequence_shares(config: Mapping[str, Any], section: str) -> int:
    """Return the number of ranks that split each sequence (Ulysses, or Megatron's context parallelism)."""
    name = "megatron.context_parallel_size" if is_megatron(config, section) else "ulysses_sequence_parallel_size"
    return int(lookup(config, f"{section}.{name}") or 1)


def _logit_bytes(config: Mapping[str, Any], section: str, entropy: bool, differentiated: bool) -> int:
    """Return the bytes of all copies of one logit together; 0 with fused kernels, which never store logits.

    FSDP2 stores each logit in bf16, and a second copy if the logits are divided by a temperature other than 1. The
    gradient of log-probs overwrites the logits, unless an entropy is differentiated too. An entropy needs a softmax and
    its product with the logits, unless the entropy is compiled or computed in chunks. Megatron stores logits in bf16
    and fp32, and its cross entropy stores a softmax in fp32.

    Args:
        entropy: whether the pass computes an entropy.
        differentiated: whether the pass includes a backward pass.
    """
    if lookup(config, f"{MODEL}.use_fused_kernels"):
        return 0
    if is_megatron(config, section):
        return 10 + 4 * (entropy and differentiated)
    engine = f"{SERVERS}.engine" if section == SERVERS else f"{section}.fsdp_config"
    compiled = bool(lookup(config, f"{engine}.use_torch_compile", True))
    small = compiled or bool(lookup(config, f"{engine}.entropy_from_logits_with_chunking"))
    scaled = bool(lookup(config, f"{ROLLOUT}.temperature", 1.0) != 1.0)
    return 2 + 2 * scaled + 4 * (entropy and (differentiated or not small))


def _rank(
    config: Mapping[str, Any], section: str, shape: ModelShape, update: Work | None, forward: Work, trained: int | None
) -> Rank:
    ranks = trainer_ranks(config)
    if is_megatron(config, section):
        layout = _megatron(config, f"{section}.megatron", ranks, trained, update is not None)
        return megatron_rank(shape, layout, update, forward)
    engine = f"{section}.fsdp" if section == CRITIC else f"{section}.fsdp_config"
    size = int(lookup(config, f"{engine}.fsdp_size") or -1)
    trains = update is not None
    fsdp = FSDP(
        shards=ranks if size < 0 or size >= ranks else size,
        model_bytes=dtype_bytes(lookup(config, f"{engine}.model_dtype")),
        compute_bytes=_compute_bytes(config, engine),
        trained=trained,
        trains=trains,
        keeps_unsharded=bool(lookup(config, f"{engine}.use_no_sync_for_gradient_accumulation")),
        reshards=bool(lookup(config, f"{engine}.reshard_after_forward", True)),
        weights_rest=bool(lookup(config, f"{engine}.param_offload")),
        optimizer_rest=bool(lookup(config, f"{engine}.optimizer_offload")),
        # If an engine is not trained, verl keeps its weights in host memory (fsdp/transformer_impl.py:459).
        on_host=not trains or bool(lookup(config, f"{engine}.offload_policy")),
    )
    return fsdp_rank(shape, fsdp, update, forward, head=section != CRITIC)


def _megatron(config: Mapping[str, Any], section: str, ranks: int, trained: int | None, trains: bool) -> Megatron:
    def size(name: str) -> int:
        return int(lookup(config, f"{section}.{name}") or 1)

    tensor = size("tensor_model_parallel_size")
    expert_tensor = lookup(config, f"{section}.expert_tensor_parallel_size")
    return Megatron(
        ranks=ranks,
        tensor=tensor,
        pipeline=size("pipeline_model_parallel_size"),
        context=size("context_parallel_size"),
        expert=size("expert_model_parallel_size"),
        expert_tensor=tensor if expert_tensor is None else int(expert_tensor),
        distributed=bool(lookup(config, f"{section}.use_distributed_optimizer", True)),
        trained=trained if trains else None,
        trains=trains,
        sequence_parallel=bool(lookup(config, f"{section}.sequence_parallel", True)) and tensor > 1,
        weights_rest=bool(lookup(config, f"{section}.param_offload")),
        optimizer_rest=bool(lookup(config, f"{section}.optimizer_offload")),
    )


def _recomputes(config: Mapping[str, Any], section: str) -> bool:
    """Return whether layers are recomputed in the backward pass (gradient checkpointing)."""
    if is_megatron(config, section):
        return bool(lookup(config, f"{section}.megatron.override_transformer_config.recompute_granularity") == "full")
    model = f"{CRITIC}.model" if section == CRITIC else MODEL
    return bool(lookup(config, f"{model}.enable_gradient_checkpointing", True))


def _compute_bytes(config: Mapping[str, Any], engine: str) -> int:
    return dtype_bytes(lookup(config, f"{engine}.mixed_precision.param_dtype", "bf16"), 2)


# SGLang's defaults by the device's memory. Each row is for devices with less memory than its first number, in GiB. The
# other numbers are: tokens of a prefill chunk; sequences of the largest CUDA graph with up to 3 tensor-parallel ranks;
# sequences of the largest CUDA graph with more ranks.
PREFILL_AND_GRAPHS = ((35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
# Memory that a sleeping vLLM engine keeps on each device (context, graphs, NCCL), by whether the engine has several
# devices. Users have reported 0.8 GiB with one device and 2.4 GiB with tensor parallelism (NVIDIA-NeMo/RL#223).
ASLEEP = {False: GIB, True: 5 * GIB // 2}


@dataclass(frozen=True, slots=True)
class Engine:
    """The memory of one accelerator of a rollout replica.

    Attributes:
        share: share of the device for weights, KV cache and, with vLLM, activations (`gpu_memory_utilization`).
        token_bytes: bytes of one token's keys and values on this accelerator.
    """

    weights: int
    share: float
    token_bytes: int

    def cache_tokens(self, device: int) -> int:
        """Return how many tokens fit into the KV cache of a device with ``device`` bytes if activations take no memory.

        If the longest request has more tokens, vLLM does not start (vllm/v1/core/kv_cache_utils.py), and SGLang cuts
        off the answer.
        """
        return max(0, int(self.share * device) - self.weights) // self.token_bytes


def rollout_engine(config: Mapping[str, Any], shape: ModelShape, hybrid: bool = False) -> Engine:
    """Return the memory of one accelerator of a rollout replica.

    ``hybrid`` is whether the replica runs on the trainer's accelerators, so that `standalone_share` does not apply.
    """
    tensor = int(lookup(config, f"{ROLLOUT}.tensor_model_parallel_size") or 1)
    own = None if hybrid else standalone_share(config)
    return _engine(config, ROLLOUT, shape, tensor, replica_size(config), own)


def teacher_engine(config: Mapping[str, Any], teacher: str, shape: ModelShape) -> Engine:
    """Return the memory of one accelerator of a teacher's server; ``teacher`` is the teacher's section."""
    sizes = teacher_tensor_size(config, teacher), teacher_size(config, teacher)
    return _engine(config, f"{teacher}.inference", shape, *sizes, None)


def prompt_logits(config: Mapping[str, Any], teacher: str, shape: ModelShape) -> Item:
    """Return the memory for the logits of a whole answer at a teacher, outside of the engine's share of the device.

    For each token of a prefill chunk, vLLM keeps the logits and their log-softmax in fp32, which it does not count when
    it sizes the KV cache (vllm/v1/worker/gpu_model_runner.py, _get_prompt_logprobs_dict).
    """
    inference = f"{teacher}.inference"
    tokens = min(longest(config), int(lookup(config, f"{inference}.max_num_batched_tokens") or 8192))
    logit = dtype_bytes(lookup(config, f"{inference}.dtype", "bfloat16"), 2) + FP32
    return Item("logits of an answer", tokens * shape.vocab * logit, certain=False)


def _engine(
    config: Mapping[str, Any], section: str, shape: ModelShape, tensor: int, ranks: int, own: float | None
) -> Engine:
    """Return an engine's memory; ``own`` is its share of the device, or None for ``gpu_memory_utilization``."""
    item = dtype_bytes(lookup(config, f"{section}.dtype", "bfloat16"), 2)
    # With expert parallelism, experts are split over all ranks of a replica; without it, only over a tensor-parallel
    # group.
    spread = ranks if int(lookup(config, f"{section}.expert_parallel_size") or 1) > 1 else tensor
    dense = shape.parameters - shape.expert_parameters
    # Tied embeddings are stored once in an engine, as they are in the model's files.
    weights = item * (dense // tensor + shape.expert_parameters // spread)
    heads = max(1, shape.kv_heads // tensor)
    share = own if own is not None else float(lookup(config, f"{section}.gpu_memory_utilization") or 0.5)
    return Engine(weights, share, 2 * shape.layers * heads * shape.head_dim * item)


def outside_share(config: Mapping[str, Any], device: int) -> Item | None:
    """Return the memory that an SGLang engine needs beyond its share of a device; None for vLLM, which stays within it.

    ``device`` is the device's memory in bytes. SGLang leaves this much memory free if it chooses the share itself
    (sglang/srt/server_args.py:1401-1560).
    """
    if lookup(config, f"{ROLLOUT}.name") != "sglang":
        return None
    tensor = int(lookup(config, f"{ROLLOUT}.tensor_model_parallel_size") or 1)
    usual, few, many = next((sizes for size, *sizes in PREFILL_AND_GRAPHS if device < size * GIB), (16384, 512, 512))
    prefill = int(lookup(config, f"{ROLLOUT}.engine_kwargs.sglang.chunked_prefill_size") or usual)
    graphs = 0 if lookup(config, f"{ROLLOUT}.enforce_eager") else few if tensor < 4 else many
    amount = (512 + 3 * max(prefill, 2048) // 2 + 2 * graphs + 128 * tensor) * MIB
    return Item("rollout engine: activations and graphs", amount, certain=False)


def standalone_share(config: Mapping[str, Any]) -> float | None:
    """Return `standalone_gpu_memory_utilization`; None if it is not set or no replica has accelerators of its own."""
    share = lookup(config, f"{ROLLOUT}.standalone_gpu_memory_utilization")
    separate = placement(config) != SHARED
    return float(share) if separate and isinstance(share, int | float) else None


def asleep(config: Mapping[str, Any]) -> Item:
    """Return the memory that a sleeping rollout engine keeps on each device."""
    return Item("sleeping rollout engine", ASLEEP[replica_size(config) > 1], certain=False)


def copy_asleep(config: Mapping[str, Any], engine: Engine) -> Item | None:
    """Return the host memory for the weights of a sleeping SGLang engine; None for vLLM, which keeps no copy."""
    sglang = lookup(config, f"{ROLLOUT}.name") == "sglang"
    return Item("copy of a sleeping engine's weights", engine.weights) if sglang else None


def bucket_bytes(config: Mapping[str, Any]) -> int:
    return int(lookup(config, BUCKET) or 2048) * MIB


def device_buckets(config: Mapping[str, Any], hands_over: bool) -> Item | None:
    """Return the memory of a weight sync's buckets on each device; None if the buckets are in host memory.

    A device has two buckets, as in verl's checkpoint engines. With ``hands_over`` it has a third one, through which the
    device's process passes the weights on to another process.
    """
    if lookup(config, f"{ROLLOUT}.checkpoint_engine.backend") == "recipe_gloo":
        return None
    return Item("weight-sync buckets", (3 if hands_over else 2) * bucket_bytes(config))


def room(config: Mapping[str, Any], positions: int | None) -> int:
    """Return the number of tokens of the longest possible request, which must fit into the KV cache.

    ``positions`` is the model's number of token positions, verl's default for `max_model_len`
    (vllm_async_server.py:1104).
    """
    return int(lookup(config, f"{ROLLOUT}.max_model_len") or 0) or positions or longest(config)

# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many architectures, named by their special features; every tensor differs between versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

WEIGHTS = "model.safetensors"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
}

# The first value is Transformers' name of the model type.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", HEADS | UNTIED),
    "llama, tied": ("llama", HEADS | TIED),
    "qwen2": ("qwen2", UNTIED),
    "qwen3": ("qwen3", HEADS | TIED),
    "mistral, sliding window": ("mistral", HEADS | {"sliding_window": 16}),
    "phi3, packed in the checkpoint": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "gemma2, sliding window": ("gemma2", HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 32}),
    "gemma3, sliding window": ("gemma3_text", HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 32}),
    "granite": ("granite", {}),
    "cohere": ("cohere", {}),
    "cohere2, sliding window": ("cohere2", HEADS | {"sliding_window": 16}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "olmo2": ("olmo2", {}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | HEADS),
    "mixtral": ("mixtral", EXPERTS | HEADS),
    "olmoe": ("olmoe", EXPERTS),
    "granitemoe": ("granitemoe", EXPERTS),
    "deepseek_v2, latent attention": ("deepseek_v2", LATENT | ROUTED | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3, router bias": (
        "deepseek_v3",
        LATENT | ROUTED | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "glm4_moe, router bias": ("glm4_moe", ROUTED | HEADS),
    "ernie4_5_moe, router bias": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "use_bias": False}
        | EXPERTS,
    ),
    "gpt_oss, sinks": ("gpt_oss", EXPERTS | HEADS | {"sliding_window": 16}),
    "glm4_moe, multi-token": ("glm4_moe", ROUTED | HEADS | {"num_nextn_predict_layers": 1}),
    "falcon_h1, hybrid": (
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1} | HEADS,
    ),
    "qwen3_next, hybrid": (
        "qwen3_next",
        EXPERTS
        | HEADS
        | {
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}

# The CPU kernels for sinks and for states support only this dtype.
DTYPES = dict.fromkeys(["gpt_oss, sinks", "falcon_h1, hybrid", "qwen3_next, hybrid"], "bfloat16")


def save(name: str, version: int, folder: Path) -> None:
    """Save a version of an architecture, with the tensor names that a trainer uses."""
    kind, more = ARCHITECTURES[name]
    config = AutoConfig.for_model(kind, **SIZES | more)
    torch.manual_seed(version)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            # Norms, biases and similar tensors are initialised with constants.
            if tensor.is_floating_point() and tensor.dim() < 2:
                tensor.add_(torch.randn(tensor.shape), alpha=0.3)
    model.save_pretrained(folder)
    if "num_nextn_predict_layers" in more:
        # Transformers has no such layer, but a checkpoint or a trainer's stream may.
        size, layer = SIZES["hidden_size"], f"model.layers.{SIZES['num_hidden_layers']}"
        parts = {f"{layer}.enorm.weight": torch.randn(size), f"{layer}.eh_proj.weight": torch.randn(size, 2 * size)}
        save_file(load_file(folder / WEIGHTS) | parts, folder / WEIGHTS, {"format": "pt"})

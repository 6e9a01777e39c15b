# SPDX-License-Identifier: Apache-2.0
"""Versions of a tiny mixture of experts, whose routers choose clearly."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS, EXPERTS, CHOSEN = 4, 8, 2
MOST_TOKENS = 512


@functools.cache
def weights_of(version: int) -> Any:
    """Return the model with the weights of a version."""
    torch.manual_seed(version)
    config = Qwen3MoeConfig(
        # At least the vocabulary of the tokenizer in cut_cases.py.
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.3,
        max_position_embeddings=MOST_TOKENS,
        eos_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).float().eval()

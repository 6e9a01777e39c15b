# SPDX-License-Identifier: Apache-2.0
"""Sizes of the models that the documentation's commands name, for a plan where their config.json is not at hand.

Values of the config.json that each has on its hub. The number of parameters that follows is the one that their authors
publish (tests/plan/test_memory.py).
"""

from collections.abc import Mapping
from typing import Any

_QWEN2 = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}


def _sizes(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_SIZES: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {**_QWEN2, **_sizes(896, 4864, 24, 14, 2)},
    "Qwen/Qwen2.5-1.5B": {**_QWEN2, **_sizes(1536, 8960, 28, 12, 2)},
    "Qwen/Qwen2.5-3B": {**_QWEN2, **_sizes(2048, 11008, 36, 16, 2)},
    "Qwen/Qwen2.5-7B": {
        **_QWEN2,
        **_sizes(3584, 18944, 28, 28, 4),
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-4B": {**_QWEN3, **_sizes(2560, 9728, 36, 32, 8), "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": {**_QWEN3, **_sizes(4096, 12288, 36, 32, 8)},
    "Qwen/Qwen3-30B-A3B": {
        **_QWEN3,
        **_sizes(2048, 6144, 48, 32, 4),
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}


def known_model(name: str) -> Mapping[str, Any] | None:
    """The config.json of a model by its name on the hub, as far as its size depends on it."""
    base = name.removesuffix("-Instruct").removesuffix("-Base")
    return _SIZES.get(base)

# SPDX-License-Identifier: Apache-2.0
"""The dimensions of a decoder-only language model, and the numbers of parameters that follow from them.

Contract: for the families in `FAMILIES`, the number of parameters is exactly that of the model in transformers. For any
other model, `shape_of` returns None. Shown by tests/plan/test_memory.py and test_memory_parts.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.rules.context import RuleContext

# For each model family: whether it has biases on q, k and v, and whether it has norms on each head's q and k.
FAMILIES: Mapping[str, tuple[bool, bool]] = {
    "llama": (False, False),
    "mistral": (False, False),
    "mixtral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model, from its config.json. In a model without experts, the dimensions of experts are 0."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    mlp: int
    qkv_bias: bool
    head_norms: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    expert_layers: int = 0

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention(self) -> int:
        """Return the number of parameters of a layer's attention, with the layer's two norms and the QK-norms."""
        weights = 2 * self.hidden * (self.q_width + self.kv_width)
        biases = (self.q_width + 2 * self.kv_width) * self.qkv_bias
        return weights + biases + 2 * self.head_dim * self.head_norms + 2 * self.hidden

    @property
    def router(self) -> int:
        return self.experts * self.hidden

    @property
    def experts_of_layer(self) -> int:
        return self.experts * 3 * self.hidden * self.expert_mlp

    @property
    def dense_mlp(self) -> int:
        return 3 * self.hidden * self.mlp

    @property
    def largest_layer(self) -> int:
        sparse = self.attention + self.router + self.experts_of_layer
        return max(sparse if self.expert_layers else 0, self.attention + self.dense_mlp if self.dense_layers else 0)

    @property
    def dense_layers(self) -> int:
        return self.layers - self.expert_layers

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def outside_layers(self) -> int:
        """Return the number of parameters of the embedding, the output head and the last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def expert_parameters(self) -> int:
        return self.expert_layers * self.experts_of_layer

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of all layers, without experts."""
        return self.layers * self.attention + self.expert_layers * self.router + self.dense_layers * self.dense_mlp

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.expert_parameters + self.outside_layers

    @property
    def without_head(self) -> int:
        """Return the number of parameters of a value model, whose head has one output instead of ``vocab`` outputs."""
        return self.layer_parameters + self.expert_parameters + self.embedding + 2 * self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters on all linear layers except experts (`all-linear`)."""
        attention = 2 * (self.hidden + self.q_width) + 2 * (self.hidden + self.kv_width)
        return rank * (self.layers * attention + self.dense_layers * 3 * (self.hidden + self.mlp))


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
"""Dimensions of the models that the documentation uses, from their config.json, so that plans do not need the file."""


def known_model(name: str) -> Mapping[str, Any] | None:
    """Return the entries of a model's config.json that determine its size; None if the model is not in `_SIZES`."""
    return _SIZES.get(name.removesuffix("-Instruct").removesuffix("-Base"))


MOST_LAYERS = 10_000


def model_of(context: RuleContext, setting: str) -> ModelShape | None:
    """Return the shape of the model that ``setting`` names; None if its sizes or its family are not known."""
    for fact in context.files:
        if fact.setting == setting and (config := fact.model_config or known_model(fact.path)) is not None:
            return shape_of(config)
    return None


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """Return a model's shape from its config.json; None if its family is unknown, or an entry is missing or invalid."""
    family = FAMILIES.get(str(config.get("model_type")))
    try:
        return None if family is None else _shape(config, *family)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _shape(config: Mapping[str, Any], qkv_bias: bool, head_norms: bool) -> ModelShape:
    heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    if not (
        0 < layers <= MOST_LAYERS and heads > 0 and int(config["hidden_size"]) > 0 and int(config["vocab_size"]) > 0
    ):
        raise ValueError(f"config.json must have 1 to {MOST_LAYERS} layers, and other sizes above 0")
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    skipped = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    return ModelShape(
        hidden=int(config["hidden_size"]),
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        mlp=int(config["intermediate_size"]),
        qkv_bias=qkv_bias or bool(config.get("attention_bias", False)),
        head_norms=head_norms,
        experts=experts,
        experts_per_token=int(config.get("num_experts_per_tok") or 0) if experts else 0,
        expert_mlp=int(config.get("moe_intermediate_size") or config["intermediate_size"]) if experts else 0,
        expert_layers=sum(1 for layer in range(layers) if experts and layer not in skipped and (layer + 1) % step == 0),
    )

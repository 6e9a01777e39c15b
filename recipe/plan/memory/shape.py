# SPDX-License-Identifier: Apache-2.0
"""The shape of a decoder-only language model, and how many parameters it has.

Contract: `shape_of` reads the config.json of the families in `FAMILIES` and counts exactly the parameters that
transformers makes; of any other model it returns None, since a guess would be worse. Shown by
tests/plan/test_memory.py and test_memory_parts.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.rules.context import RuleContext
from recipe.plan.memory.known import known_model

# What a family has beside the weights of its linear layers: biases of q, k and v; a norm of each head's q and k.
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
    """Sizes as config.json has them; `expert_mlp` and the like are 0 in a dense model."""

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
        """Parameters of one layer's attention, its norms and the layer's two norms included."""
        weights = 2 * self.hidden * (self.q_width + self.kv_width)
        biases = (self.q_width + 2 * self.kv_width) * self.qkv_bias
        return weights + biases + 2 * self.head_dim * self.head_norms + 2 * self.hidden

    @property
    def router(self) -> int:
        return self.experts * self.hidden

    @property
    def experts_of_layer(self) -> int:
        """Parameters of all experts of one layer."""
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
        """Parameters of embedding, output head and the last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def expert_parameters(self) -> int:
        return self.expert_layers * self.experts_of_layer

    @property
    def layer_parameters(self) -> int:
        """Of all layers, without the experts."""
        return self.layers * self.attention + self.expert_layers * self.router + self.dense_layers * self.dense_mlp

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.expert_parameters + self.outside_layers

    @property
    def without_head(self) -> int:
        """Parameters of a value model: one output in place of the vocabulary."""
        return self.layer_parameters + self.expert_parameters + self.embedding + 2 * self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer (`target_modules=all-linear`) but the experts'."""
        attention = 2 * (self.hidden + self.q_width) + 2 * (self.hidden + self.kv_width)
        return rank * (self.layers * attention + self.dense_layers * 3 * (self.hidden + self.mlp))


MOST_LAYERS = 10_000


def model_of(context: RuleContext, setting: str) -> ModelShape | None:
    """The shape of the model that a setting names, where its config.json, or its name, says it."""
    for fact in context.files:
        if fact.setting == setting and (config := fact.model_config or known_model(fact.path)) is not None:
            return shape_of(config)
    return None


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config.json describes, or None where its family is not known or a size is missing."""
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
        raise ValueError("sizes of no model")
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

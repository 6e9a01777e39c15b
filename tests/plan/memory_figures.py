# SPDX-License-Identifier: Apache-2.0
"""Published and measured amounts of memory, and the estimate for the same configuration (docs/memory.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipe.plan.memory.engines import rollout_engine
from recipe.plan.memory.items import GIB, MIB
from recipe.plan.memory.shape import ModelShape, known_model, shape_of
from recipe.plan.memory.training import CONTEXT, FSDP, Megatron, Rank, Work, fsdp_rank, megatron_rank

GB = 10**9


def known(name: str) -> ModelShape:
    config = known_model(name)
    shape = None if config is None else shape_of(config)
    assert shape is not None, name
    return shape


def sized(family: str, **sizes: int | bool) -> ModelShape:
    names = {"hidden": "hidden_size", "mlp": "intermediate_size", "layers": "num_hidden_layers"}
    names |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "vocab": "vocab_size"}
    shape = shape_of({"model_type": family} | {names.get(name, name): value for name, value in sizes.items()})
    assert shape is not None
    return shape


@dataclass(frozen=True)
class Figure:
    """An amount of memory that was published, or that a program measured."""

    what: str
    amount: float  # bytes
    estimate: Callable[[], float]
    unit: int = GIB

    @property
    def error(self) -> float:
        return self.estimate() / self.amount - 1

    def row(self) -> str:
        """Return the row of the documentation's table."""
        unit = {GIB: "GiB", MIB: "MiB", GB: "GB"}[self.unit]
        amounts = f"{self.amount / self.unit:.2f} {unit} | {self.estimate() / self.unit:.2f} {unit}"
        return f"| {self.what} | {amounts} | {self.error:+.1%} |"


def states(rank: Rank) -> int:
    return rank.weights + rank.gradients + rank.optimizer


def update(rank: Rank) -> int:
    """Return the bytes of an update, without the process itself, which torch's tracker does not see."""
    return sum(item.bytes for item in rank.updating if item != CONTEXT)


def engine_weights(name: str, tensor: int) -> int:
    rollout = {"tensor_model_parallel_size": tensor, "dtype": "bfloat16"}
    return rollout_engine({"actor_rollout_ref": {"rollout": rollout}}, known(name)).weights


def trained(name: str, ranks: int, tokens: int) -> Callable[[], int]:
    return lambda: update(fsdp_rank(known(name), FSDP(ranks), Work(tokens, logit_bytes=2), None))


SEVEN = "Qwen/Qwen2.5-7B"
GQA = {"layers": 24, "hidden": 512, "mlp": 1792, "heads": 4, "kv_heads": 1, "vocab": 128256}
OPEN_SCI = {"layers": 24, "hidden": 2048, "mlp": 8192, "heads": 32, "kv_heads": 32, "vocab": 50304, "head_dim": 64}
LLAMA_8B = {"layers": 32, "hidden": 4096, "mlp": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}

PUBLISHED = (
    Figure(
        "ZeRO stage 3 of 7.5B over 64 ranks: weights, gradients, optimizer",
        1.9 * GB,
        # Weights and gradients in fp16, an fp32 copy and Adam's moments: 16 bytes per parameter, like FSDP2's in fp32.
        lambda: 7.5 * GB * states(fsdp_rank(known(SEVEN), FSDP(64), None, None)) / known(SEVEN).parameters,
        GB,
    ),
    Figure(
        "verl, FSDP: weights of a 7B critic on one of 4 ranks",
        6.59 * GIB,
        lambda: fsdp_rank(known("Qwen/Qwen2.5-7B"), FSDP(4), None, None, head=False).weights,
    ),
    Figure(
        "torchtitan, FSDP2: Llama 3.1 8B on 8 ranks, 32,768 tokens, full recomputation",
        83.9 * GIB,
        # The loss takes logits in bf16 and fp32, their log-softmax, and the gradient in bf16.
        lambda: sum(
            item.bytes for item in fsdp_rank(sized("llama", **LLAMA_8B), FSDP(8), Work(32768, 12), None).updating
        ),
    ),
    Figure(
        "Megatron-LM, dense 1.7B, data parallel 252: after a step",
        9909.08 * MIB,
        lambda: states(
            megatron_rank(sized("qwen3", **OPEN_SCI, tie_word_embeddings=True), Megatron(252), Work(1, 0), None)
        ),
        MIB,
    ),
    Figure(
        "Megatron-LM, dense 0.2B, data parallel 8: after a step",
        1550.40 * MIB,
        lambda: states(megatron_rank(sized("llama", **GQA), Megatron(8), Work(1, 0), None)),
        MIB,
    ),
    Figure(
        "Megatron-LM, 64 experts, 4.4B, expert parallel 4 on 8 ranks: after a step",
        13243.48 * MIB,
        lambda: states(
            megatron_rank(
                sized("mixtral", **GQA, num_local_experts=64, num_experts_per_tok=1),
                Megatron(8, expert=4),
                Work(1, 0),
                None,
            )
        ),
        MIB,
    ),
    Figure(
        "vLLM 0.8.5, Qwen3-30B-A3B, tensor parallel 4: weights",
        14.2474 * GIB,
        lambda: engine_weights("Qwen/Qwen3-30B-A3B", 4),
    ),
    Figure("vLLM, Qwen3-4B: weights", 7.6785 * GIB, lambda: engine_weights("Qwen/Qwen3-4B", 1)),
)
# Measured by tools/measure_fsdp2_memory.py MODEL RANKS TOKENS.
MEASURED = (
    Figure("FSDP2 update: Qwen2.5-0.5B on 1 rank, 16,384 tokens", 14552170504, trained("Qwen/Qwen2.5-0.5B", 1, 16384)),
    Figure("FSDP2 update: Qwen2.5-3B on 4 ranks, 16,384 tokens", 21749892616, trained("Qwen/Qwen2.5-3B", 4, 16384)),
    Figure("FSDP2 update: Qwen2.5-7B on 8 ranks, 18,432 tokens", 29917656584, trained("Qwen/Qwen2.5-7B", 8, 18432)),
    Figure("FSDP2 update: Qwen3-4B on 8 ranks, 22,528 tokens", 21896920072, trained("Qwen/Qwen3-4B", 8, 22528)),
)

# SPDX-License-Identifier: Apache-2.0
"""How many bf16 values an AdamW step changes at 0.5B, what sending only those comes to, and how fast that is.

    python benchmarks/delta_bytes.py [--steps 4] [--layers 24] [--rates 1e-6 1e-5] [--length 64]

A model of Qwen2.5-0.5B's shape with random weights and fp32 masters, and real gradients of random tokens, with AdamW as
verl sets it up (betas 0.9 and 0.999, weight decay 0.01, gradients clipped to a norm of 1), whose moments begin at zero:
a first step moves every value by about the learning rate, later ones by less. Each step's weights are sent in bf16 as
changes of those of the step before, by recipe/async_engine/weights/delta.py, and compared with what was sent. One line
of JSON for each step; `copy_gb_per_s` is a plain copy of the same tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipe.async_engine.weights.checksum import StreamChecksum
from recipe.async_engine.weights.delta import Base, Decoder, Sizes, encode

ROWS = 2


def model_of(layers: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).train()


def wire(model: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
    """As they would be sent."""
    return {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}


def train(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, length: int) -> None:
    tokens = torch.randint(0, model.config.vocab_size, (ROWS, length))
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def copy_seconds(weights: dict[str, torch.Tensor], into: Base) -> float:
    began = time.perf_counter()
    for name, tensor in weights.items():
        into.tensors[name].copy_(tensor)
    return time.perf_counter() - began


def send(weights: dict[str, torch.Tensor], version: int, ours: Base, theirs: Base) -> dict[str, float]:
    """Encode and decode in turns; see that what arrived is what was sent."""
    sizes, decoder, seconds = Sizes(), Decoder(theirs), {"encode": 0.0, "decode": 0.0}
    stream: Iterator[tuple[str, torch.Tensor]] = encode(weights.items(), version, ours, sizes)
    while True:
        began = time.perf_counter()
        item = next(stream, None)
        encoded = time.perf_counter()
        seconds["encode"] += encoded - began
        if item is None:
            break
        for _ in decoder.take(*item):
            continue
        seconds["decode"] += time.perf_counter() - encoded
    decoder.finish()
    right = StreamChecksum()
    for name, tensor in weights.items():
        right.add(name, tensor)
    assert theirs.checksum == right.value() and theirs.version == version
    gigabytes = sizes.full_bytes / 1e9
    return {
        "changed": sizes.changed / sizes.values,
        "mb_full": sizes.full_bytes / 1e6,
        "mb_sent": sizes.sent_bytes / 1e6,
        "sent_of_full": sizes.sent_bytes / sizes.full_bytes,
        "encode_gb_per_s": gigabytes / seconds["encode"],
        "decode_gb_per_s": gigabytes / seconds["decode"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--length", type=int, default=64)
    arguments = parser.parse_args()
    for rate in arguments.rates:
        model = model_of(arguments.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, foreach=False)
        ours, theirs = Base(), Base()
        send(wire(model), 0, ours, theirs)
        for step in range(1, arguments.steps + 1):
            train(model, optimizer, arguments.length)
            weights = wire(model)
            measured = send(weights, step, ours, theirs)
            measured["copy_gb_per_s"] = measured["mb_full"] / 1e3 / copy_seconds(weights, theirs)
            rounded = {key: float(f"{value:.4g}") for key, value in measured.items()}
            sys.stdout.write(json.dumps({"rate": rate, "step": step, **rounded}) + "\n")
            sys.stdout.flush()
            del weights  # a gigabyte, which the next step needs
        del model, optimizer
        gc.collect()


if __name__ == "__main__":
    main()

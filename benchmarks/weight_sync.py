# SPDX-License-Identifier: Apache-2.0
"""Compares one weight sync through the checkpoint engine `recipe_gloo` with a plain copy of the same bytes in memory.

    python benchmarks/weight_sync.py [--repeats 7] [--replicas 1] [--bucket-mib 64]

Sender and receivers are separate processes; a receiver copies each tensor out of its bucket into a buffer of its own,
as an engine that loads it would. Both compute checksums, which are compared. The shapes are those of a tiny model and
of a 0.5B-parameter one (Qwen2.5-0.5B) in bf16. The plain copy is one process's `Tensor.copy_` of the same tensors,
alternating with the syncs. The metric `fully_async/weight_sync/generation_paused_seconds` shows how long generation
stands still in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from recipe.async_engine.weights.checksum import CHECKSUM, StreamChecksum, SummedSender
from recipe.laptop.transfer.gloo_engine import GlooCheckpointEngine

ANSWER_S = 300


def shapes(
    layers: int, hidden: int, feed_forward: int, key_value: int, vocabulary: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a Qwen2 model with tied embeddings."""
    rows: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocabulary, hidden))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        rows += [
            (f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)),
            (f"{prefix}.self_attn.q_proj.bias", (hidden,)),
            (f"{prefix}.self_attn.k_proj.weight", (key_value, hidden)),
            (f"{prefix}.self_attn.k_proj.bias", (key_value,)),
            (f"{prefix}.self_attn.v_proj.weight", (key_value, hidden)),
            (f"{prefix}.self_attn.v_proj.bias", (key_value,)),
            (f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)),
            (f"{prefix}.mlp.gate_proj.weight", (feed_forward, hidden)),
            (f"{prefix}.mlp.up_proj.weight", (feed_forward, hidden)),
            (f"{prefix}.mlp.down_proj.weight", (hidden, feed_forward)),
            (f"{prefix}.input_layernorm.weight", (hidden,)),
            (f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        ]
    return [*rows, ("model.norm.weight", (hidden,))]


MODELS = {
    "tiny": (shapes(2, 64, 128, 32, 64), torch.float32),
    "0.5B": (shapes(24, 896, 4864, 128, 151_936), torch.bfloat16),
}


def tensors(model: str, fill: float) -> dict[str, torch.Tensor]:
    rows, dtype = MODELS[model]
    return {name: torch.full(shape, fill, dtype=dtype) for name, shape in rows}


def member(pipe: Any, is_master: bool, model: str, bucket_bytes: int) -> None:
    """Serve commands in one process, answering each."""
    engine = GlooCheckpointEngine(bucket_bytes, is_master=is_master, timeout_s=120.0, connect_timeout_s=30.0)
    sender = SummedSender(engine)
    own = tensors(model, 1.0 if is_master else 0.0)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from own.items()

    async def receive(version: int) -> str:
        checksum = StreamChecksum()
        async for name, tensor in checksum.watching(engine.receive_weights(global_steps=version)):
            own[name].copy_(tensor)
        return checksum.value()

    while True:
        command, arguments = pipe.recv()
        if command == "send":
            answer = asyncio.run(sender.send_weights(weights(), **arguments))[CHECKSUM]
        elif command == "receive":
            answer = asyncio.run(receive(**arguments))
        elif command == "holds":
            answer = all(bool((tensor == 1).all()) for tensor in own.values())
        else:
            answer = getattr(engine, command)(**arguments)
        pipe.send(answer)


class Member:
    def __init__(self, is_master: bool, model: str, bucket_bytes: int) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, far_end = context.Pipe()
        context.Process(target=member, args=(far_end, is_master, model, bucket_bytes), daemon=True).start()

    def start(self, command: str, **arguments: Any) -> None:
        self.pipe.send((command, arguments))

    def answer(self) -> Any:
        if not self.pipe.poll(ANSWER_S):
            raise TimeoutError("a member did not answer")
        return self.pipe.recv()

    def call(self, command: str, **arguments: Any) -> Any:
        self.start(command, **arguments)
        return self.answer()


def connect(members: list[Member]) -> None:
    metadata = [each.call("prepare") for each in members]
    to_actors, to_rollout = GlooCheckpointEngine.build_topology(1, len(members) - 1, metadata)
    for place, each in enumerate(members):
        side, index = (to_actors, 0) if place == 0 else (to_rollout, place - 1)
        each.start("init_process_group", **{key: value[index] for key, value in side.items()})
    for each in members:
        each.answer()


def sync(members: list[Member], version: int) -> float:
    began = time.perf_counter()
    members[0].start("send", global_steps=version)
    for each in members[1:]:
        each.start("receive", version=version)
    checksums = {each.answer() for each in members}
    seconds = time.perf_counter() - began
    assert len(checksums) == 1, "a receiver got other weights than were sent"
    return seconds


def copy_seconds(model: str) -> float:
    source, target = tensors(model, 1.0), tensors(model, 0.0)
    began = time.perf_counter()
    for name, tensor in source.items():
        target[name].copy_(tensor)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for model in MODELS:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors(model, 0.0).values())
        members = [Member(place == 0, model, arguments.bucket_mib << 20) for place in range(1 + arguments.replicas)]
        connect(members)
        sync(members, 0)
        syncs, copies = [], []
        for version in range(1, arguments.repeats + 1):
            syncs.append(sync(members, version))
            copies.append(copy_seconds(model))
        assert all(each.call("holds") for each in members), "a receiver does not hold what was sent"
        ratios = [copy / transfer for copy, transfer in zip(copies, syncs, strict=True)]
        row = {
            "model": model,
            "replicas": arguments.replicas,
            "megabytes": round(size / 1e6, 2),
            "sync_s": round(statistics.median(syncs), 4),
            "sync_GB_per_s": round(size / 1e9 / statistics.median(syncs), 3),
            "copy_GB_per_s": round(size / 1e9 / statistics.median(copies), 3),
            "sync_rate_over_copy_rate": round(statistics.median(ratios), 3),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Compares a log-prob server's engine in bf16 with Hugging Face's forward in the same precision, on any device.

It is a separate program, because an engine joins a process group: ``python log_probs.py DEVICE BACKEND FOLDER`` prints
its results as one line of JSON. On a CPU the model is a small one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# About 0.4B parameters.
LARGE = SMALL | {
    "vocab_size": 32000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Allowed distance of the engine from fp32, as a multiple of that of Hugging Face's own forward in bf16.
ROUNDING_MEAN, ROUNDING_LARGEST = 2, 4
LENGTHS = (700, 64, 1500, 333)
TOKENS = 32768
REPEATS = 5


def make_model(device: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**(SMALL if device == "cpu" else LARGE))).to(torch.bfloat16).eval()


def make_adapter(device: str, backend: str, folder: str) -> Any:
    from verl.workers.config import FSDPEngineConfig, HFModelConfig, McoreEngineConfig, RolloutConfig

    from recipe.async_engine.log_prob_servers.adapter import ModelEngineServerAdapter, WorkerSettings

    packed = has_flash_attention(device)
    model = HFModelConfig(
        path=f"{folder}/model",
        use_remove_padding=packed or backend == "megatron",
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "flash_attention_2" if packed else "sdpa"},
    )
    batches = {"use_dynamic_bsz": True, "infer_max_token_len_per_gpu": TOKENS, "infer_micro_batch_size_per_gpu": 1}
    if backend == "fsdp2":
        engine: Any = FSDPEngineConfig(
            strategy="fsdp2", model_dtype="bf16", dtype="bfloat16", use_torch_compile=False, **batches
        )
    else:
        engine = McoreEngineConfig(vanilla_mbridge=True, forward_only=True, sequence_parallel=False, **batches)
    return ModelEngineServerAdapter(RolloutConfig(name="vllm"), model, WorkerSettings(engine))


def sequences(device: str, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    vocabulary = (SMALL if device == "cpu" else LARGE)["vocab_size"]
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]


def differences(adapter: Any, device: str, seed: int) -> dict[str, float]:
    """Return mean and largest distance of the engine and of Hugging Face in bf16 from the fp32 results."""
    from recipe.async_engine.log_prob_servers.worker import from_batch, to_batch

    rows = sequences(device, LENGTHS)
    scored = from_batch(adapter.score(to_batch(rows, temperature=1.0)))
    rounded, exact = make_model(device, seed).to(device), make_model(device, seed).to(device).float()
    ours, theirs = [], []
    for tokens, scores in zip(rows, scored, strict=True):
        right = columns(exact, tokens.to(device))
        ours.append(np.abs(scores[:, 1:] - right))
        theirs.append(np.abs(columns(rounded, tokens.to(device), widened=has_flash_attention(device)) - right))
    found = {"engine": np.concatenate(ours, 1), "hugging_face": np.concatenate(theirs, 1)}
    return {f"{name}_mean": float(values.mean()) for name, values in found.items()} | {
        f"{name}_largest": float(values.max()) for name, values in found.items()
    }


@torch.no_grad()
def columns(model: torch.nn.Module, tokens: torch.Tensor, widened: bool = True) -> np.ndarray:
    """Return log-probs and entropies, float32 (2, length - 1).

    Args:
        widened: compute in fp32. verl does so with a kernel of flash-attn's, and otherwise computes in the dtype of the
            logits (verl/utils/torch_functional.py:99).
    """
    logits = model(tokens[None]).logits[0, :-1]
    if widened:
        logits = logits.float()
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
    entropy = torch.logsumexp(logits, -1) - (torch.softmax(logits, -1) * logits).sum(-1)
    return torch.stack([chosen, entropy]).float().cpu().numpy()


def has_flash_attention(device: str) -> bool:
    return device != "cpu" and importlib.util.find_spec("flash_attn") is not None


def tokens_per_second(adapter: Any, device: str) -> dict[str, float]:
    """Return tokens per second and the share of ``PEAK_TFLOPS``, at two operations per parameter and pass."""
    from recipe.async_engine.log_prob_servers.worker import to_batch

    rows = sequences(device, (2048,) * (1 if device == "cpu" else 16))
    batch = to_batch(rows, temperature=1.0)
    parameters = sum(parameter.numel() for parameter in make_model(device, 0).parameters())
    for _ in range(2):
        adapter.score(batch)
    began = time.perf_counter()
    for _ in range(REPEATS):
        # The result is in host memory, so there is nothing left to wait for on the device.
        adapter.score(batch)
    rate = REPEATS * sum(map(len, rows)) / (time.perf_counter() - began)
    peak = float(os.environ.get("PEAK_TFLOPS", 0)) * 1e12
    share = {"share_of_peak": round(2 * parameters * rate / peak, 3)} if peak else {}
    return {"tokens_per_second": round(rate), **share}


def play(device: str, backend: str, folder: str) -> dict[str, Any]:
    make_model(device, 0).save_pretrained(f"{folder}/model")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    groups = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(groups, init_method=f"file://{folder}/store", rank=0, world_size=1)
    if device == "cpu":
        from recipe.laptop.platform import engines

        engines.register()
    adapter = make_adapter(device, backend, folder)
    seen: dict[str, Any] = {"at_first": differences(adapter, device, seed=0)}
    new = make_model(device, 1).state_dict()
    asyncio.run(adapter.update_weights(((name, tensor.to(device)) for name, tensor in new.items()), global_steps=1))
    seen["staged"] = differences(adapter, device, seed=0)
    adapter.swap(1)
    seen["promoted"] = differences(adapter, device, seed=1)
    return seen | tokens_per_second(adapter, device)


def check_close(seen: dict[str, Any]) -> None:
    """Check that the engine is as close as bf16 can be, before and after an update of its weights."""
    for moment in ("at_first", "staged", "promoted"):
        found = seen[moment]
        assert 0 < found["engine_mean"] <= ROUNDING_MEAN * found["hugging_face_mean"]
        assert found["engine_largest"] <= ROUNDING_LARGEST * found["hugging_face_largest"]
    assert seen["tokens_per_second"] > 0


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = play(*sys.argv[1:])
    sys.stdout.write(json.dumps(found) + "\n")

# SPDX-License-Identifier: Apache-2.0
"""Log-prob servers' engines on an accelerator, in bf16, against Hugging Face's forward in the same precision.

Two implementations of the same mathematics in bf16 differ by its rounding: 8 bits of mantissa, 2^-8 of a logit of the
size of ten, several times over. What is asserted is a mean difference of a hundredth and none above a quarter.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    # Before verl is imported: it chooses its platform then, for all tests of the session.
    pytest.skip("no accelerator", allow_module_level=True)

from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.workers.config import (
    FSDPEngineConfig,
    HFModelConfig,
    McoreEngineConfig,
    RolloutConfig,
)

from recipe.async_engine.model_engine.adapter import ModelEngineServerAdapter, WorkerSettings
from recipe.async_engine.model_engine.sequences import from_batch, to_batch

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""About 0.4B parameters."""
LENGTHS = (700, 64, 1500, 333)
TOKENS = 32768
MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 0.01, 0.25
BACKENDS = ["fsdp2"]
if importlib.util.find_spec("megatron") and importlib.util.find_spec("transformer_engine"):
    BACKENDS.append("megatron")


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16).eval()


@pytest.fixture(scope="module", params=BACKENDS)
def adapter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, device_id=None
        )
    packed = importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if packed else "sdpa"
    model = HFModelConfig(
        path=str(folder),
        use_remove_padding=packed or request.param == "megatron",
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": attention},
    )
    batches = {"use_dynamic_bsz": True, "infer_max_token_len_per_gpu": TOKENS, "infer_micro_batch_size_per_gpu": 1}
    if request.param == "fsdp2":
        engine = FSDPEngineConfig(
            strategy="fsdp2", model_dtype="bf16", dtype="bfloat16", use_torch_compile=False, **batches
        )
        return ModelEngineServerAdapter(RolloutConfig(name="vllm"), model, WorkerSettings(engine))
    megatron = McoreEngineConfig(vanilla_mbridge=True, forward_only=True, sequence_parallel=False, **batches)
    return ModelEngineServerAdapter(RolloutConfig(name="vllm"), model, WorkerSettings(megatron))


def sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, SHAPE["vocab_size"], (length,), generator=generator) for length in lengths]


def check(adapter: Any, seed: int) -> None:
    rows = sequences(LENGTHS)
    scored = from_batch(adapter.score(to_batch(rows, temperature=1.0)))
    model = make_model(seed).cuda()
    for tokens, scores in zip(rows, scored, strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(model(tokens[None].cuda()).logits[0, :-1].float(), -1)
        log_probs = expected.gather(-1, tokens[1:, None].cuda())[:, 0].cpu()
        entropy = -(expected.exp() * expected).sum(-1).cpu()
        for computed, right in zip(scores[:, 1:], (log_probs, entropy), strict=True):
            difference = np.abs(computed - right.numpy())
            assert difference.mean() <= MEAN_DIFFERENCE and difference.max() <= LARGEST_DIFFERENCE


def test_log_probs_before_and_after_a_streamed_update(adapter: Any) -> None:
    check(adapter, seed=0)
    new = make_model(1).state_dict()
    asyncio.run(adapter.update_weights(((name, tensor.cuda()) for name, tensor in new.items()), global_steps=1))
    check(adapter, seed=0)
    adapter.promote()
    check(adapter, seed=1)


def test_tokens_per_second(adapter: Any, request: pytest.FixtureRequest) -> None:
    """Prints what docs/benchmarks.md reports: tokens a second, and the share of the device's peak if it is known."""
    rows = sequences((2048,) * 16)
    batch = to_batch(rows, temperature=1.0)
    parameters = sum(parameter.numel() for parameter in make_model(0).parameters())
    for _ in range(2):
        adapter.score(batch)
    torch.cuda.synchronize()
    began = time.perf_counter()
    repeats = 5
    for _ in range(repeats):
        adapter.score(batch)
    torch.cuda.synchronize()
    rate = repeats * sum(map(len, rows)) / (time.perf_counter() - began)
    result: dict[str, Any] = {"backend": request.node.callspec.params["adapter"], "tokens_per_second": round(rate)}
    peak = float(os.environ.get("PEAK_TFLOPS", 0)) * 1e12
    if peak:
        # A forward pass takes two operations for each parameter and token.
        result["share_of_peak"] = round(2 * parameters * rate / peak, 3)
    Path(os.environ.get("OUT", ".")).joinpath("log_probs.jsonl").open("a").write(json.dumps(result) + "\n")
    assert rate > 0

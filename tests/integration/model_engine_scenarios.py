# SPDX-License-Identifier: Apache-2.0
"""Ranks of a log-prob server around verl's FSDP2 and Megatron engines, on the CPU.

It is a separate program, because the Megatron ranks patch what they import. It runs each scenario on ranks that are
forks of one process, which has imported everything, and prints a line of JSON for each: its name, and for each rank its
results or its traceback.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import megatron_on_cpu
import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from verl.workers.config import FSDPEngineConfig, HFModelConfig, McoreEngineConfig, RolloutConfig
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from recipe.async_engine.log_prob_servers.adapter import ModelEngineServerAdapter, WorkerSettings
from recipe.async_engine.log_prob_servers.worker import from_batch, to_batch
from recipe.async_engine.weights.staged import StagingRefused

VOCABULARY = 64
LENGTHS = (13, 24, 7, 20)
TEMPERATURE = 0.7
RANKS_S = 120
ENDS_S = 10


@dataclass(frozen=True)
class Scenario:
    backend: str
    family: str
    tied: bool
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    packed: bool = True
    bf16: bool = False
    expert: int = 1

    @property
    def name(self) -> str:
        tied = "tied" if self.tied else "untied"
        layout = f"dp{self.data}-tp{self.tensor}-pp{self.pipeline}"
        suffix = "-bf16" if self.bf16 else f"-ep{self.expert}" if self.expert > 1 else ""
        return f"{self.backend}-{self.family}-{tied}-{layout}-{'packed' if self.packed else 'padded'}{suffix}"

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def a_part(self) -> str:
        """Return the name of one of its tensors."""
        expert = "" if self.family in ("qwen2", "qwen3") else "experts.2."
        return f"model.layers.1.mlp.{expert}up_proj.weight"


SCENARIOS = (
    Scenario("fsdp2", "qwen3", tied=False, packed=False),
    Scenario("fsdp2", "qwen2", tied=True, data=2, packed=False),
    Scenario("fsdp2", "qwen3", tied=False, packed=False, bf16=True),
    Scenario("fsdp2", "qwen3_moe", tied=False, packed=False),
    Scenario("fsdp2", "qwen2_moe", tied=False, data=2, packed=False),
    Scenario("megatron", "qwen3", tied=False),
    Scenario("megatron", "qwen2", tied=True, packed=False),
    Scenario("megatron", "qwen3", tied=True, tensor=2),
    Scenario("megatron", "qwen2", tied=False, tensor=2),
    Scenario("megatron", "qwen2", tied=True, pipeline=2),
    Scenario("megatron", "qwen3", tied=False, pipeline=2),
    Scenario("megatron", "qwen3_moe", tied=False, pipeline=2),
    Scenario("megatron", "qwen3_moe", tied=False, data=2, expert=2),
)


# With expert parallelism each rank has two.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True, **EXPERTS},
    "qwen2_moe": {"shared_expert_intermediate_size": 16, **EXPERTS},
}


def make_model(scenario: Scenario, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        scenario.family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=scenario.tied,
        initializer_range=0.2,
        **SIZES.get(scenario.family, {}),
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def make_adapter(scenario: Scenario, path: str) -> ModelEngineServerAdapter:
    model = HFModelConfig(
        path=path,
        use_remove_padding=scenario.packed,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    rollout = RolloutConfig(name="vllm")
    batches = {"use_dynamic_bsz": True, "infer_max_token_len_per_gpu": 32, "infer_micro_batch_size_per_gpu": 2}
    if scenario.backend == "fsdp2":
        short, long = ("bf16", "bfloat16") if scenario.bf16 else ("fp32", "float32")
        precision = {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            forward_only=True,
            model_dtype=short,
            dtype=long,
            mixed_precision=precision,
            use_torch_compile=False,
            **batches,
        )
        return ModelEngineServerAdapter(rollout, model, WorkerSettings(engine))
    parallel = scenario.tensor > 1
    config = McoreEngineConfig(
        tensor_model_parallel_size=scenario.tensor,
        pipeline_model_parallel_size=scenario.pipeline,
        expert_model_parallel_size=scenario.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel,
        vanilla_mbridge=True,
        forward_only=True,
        override_transformer_config=megatron_on_cpu.TRANSFORMER_CONFIG | {"sequence_parallel": parallel},
        **batches,
    )
    # verl allows only half precision, but the comparison needs exact arithmetic.
    object.__setattr__(config, "dtype", "float32")
    return ModelEngineServerAdapter(rollout, model, WorkerSettings(config))


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def largest_difference(adapter: ModelEngineServerAdapter, scenario: Scenario, seed: int) -> float | None:
    """Return the difference from Hugging Face's log-probs and entropies; None on a rank without output."""
    own = sequences()[dist.get_rank() :: 2] if scenario.data == 2 else sequences()
    output = adapter.score(to_batch(own, temperature=TEMPERATURE))
    if output is None:
        return None
    reference, largest = make_model(scenario, seed), 0.0
    for tokens, scores in zip(own, from_batch(output), strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(reference(tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
        log_probs = expected.gather(-1, tokens[1:, None])[:, 0]
        entropy = -(expected.exp() * expected).sum(-1)
        assert scores.shape == (2, len(tokens)) and scores.dtype == np.float32
        for computed, right in zip(scores[:, 1:], (log_probs, entropy), strict=True):
            largest = max(largest, float(np.abs(computed - right.numpy()).max()))
    return largest


def rounding_of_bf16(scenario: Scenario, seed: int) -> float:
    """Return the largest difference between Hugging Face's forward passes in bf16 and fp32, over the same log-probs."""
    largest, model, rounded = 0.0, make_model(scenario, seed), make_model(scenario, seed).bfloat16()
    for tokens in sequences():
        with torch.no_grad():
            columns = [
                torch.log_softmax(which(tokens[None]).logits[0, :-1].float() / TEMPERATURE, -1).gather(
                    -1, tokens[1:, None]
                )
                for which in (model, rounded)
            ]
        largest = max(largest, (columns[0] - columns[1]).abs().max().item())
    return largest


def load(adapter: ModelEngineServerAdapter, weights: dict[str, torch.Tensor], broken_after: int | None = None) -> None:
    """Load weights in random order through one buffer that is reused for each tensor, as a transport does."""
    items = list(weights.items())
    random.Random(0).shuffle(items)
    buffer = torch.empty(max(tensor.numel() for tensor in weights.values()))

    async def stream() -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        for number, (name, tensor) in enumerate(items):
            if number == broken_after:
                raise ConnectionError("the trainer is gone")
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        buffer.fill_(float("nan"))

    asyncio.run(adapter.update_weights(stream(), global_steps=1))


def refusal(adapter: ModelEngineServerAdapter, *arguments: Any) -> str | None:
    try:
        load(adapter, *arguments)
    except StagingRefused as error:
        return str(error)
    return None


def play(scenario: Scenario, path: str) -> dict[str, Any]:
    adapter = make_adapter(scenario, path)
    # verl's engine sends the weights of such a model expert by expert.
    new = dict(unfuse_moe_params(make_model(scenario, seed=1).state_dict().items(), scenario.family))
    name = scenario.a_part
    seen: dict[str, Any] = {"at_first": largest_difference(adapter, scenario, seed=0)}
    seen["missing"] = refusal(adapter, {key: tensor for key, tensor in new.items() if key != name})
    seen["wrong_shape"] = refusal(adapter, new | {name: new[name][:-1]})
    seen["unknown"] = refusal(adapter, new | {name.replace("layers.1", "layers.2"): new[name]})
    # The stream is cut off on one rank only; the others receive everything, but must not accept it either.
    seen["cut_off"] = refusal(adapter, new, 5 if dist.get_rank() == scenario.ranks - 1 else None)
    load(adapter, new)
    seen["staged"] = largest_difference(adapter, scenario, seed=0)
    adapter.swap(1)
    seen["promoted"] = largest_difference(adapter, scenario, seed=1)
    if scenario.bf16:
        return seen | {"rounding": rounding_of_bf16(scenario, seed=0)}
    exported = {key: tensor.clone() for key, tensor in adapter.worker.engine.get_per_tensor_param()[0]}
    same = {key for key in exported if torch.equal(exported[key].float(), new[key])}
    seen["exported"] = exported.keys() == same and (scenario.tied or same == new.keys())
    # What the engine exports can be loaded by another one.
    load(adapter, exported)
    return seen


def run_rank(rank: int, scenario: Scenario, folder: str, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(scenario.ranks)}
    # verl's workers need these variables, although the ranks meet in a file.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if scenario.backend == "megatron":
        # verl registers its Megatron engine for accelerators only.
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"
        megatron_on_cpu.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=scenario.ranks)
    try:
        seen = play(scenario, f"{folder}/model")
        dist.barrier()
    except Exception:
        seen = {"traceback": traceback.format_exc()}
    results.put((rank, seen))


def main(names: list[str]) -> None:
    context = multiprocessing.get_context("fork")
    for scenario in SCENARIOS:
        if names and scenario.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            make_model(scenario, seed=0).save_pretrained(f"{folder}/model")
            results = context.Queue()
            ranks = range(scenario.ranks)
            processes = [context.Process(target=run_rank, args=(rank, scenario, folder, results)) for rank in ranks]
            for process in processes:
                process.start()
            seen = dict(results.get(timeout=RANKS_S) for _ in ranks)
            for process in processes:
                process.join(ENDS_S)
                process.kill()
            sys.stdout.write(json.dumps({"scenario": scenario.name, "ranks": [seen[rank] for rank in ranks]}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Weights staged beside live Megatron engines of verl's, on the CPU. A program of its own: it patches what it imports.

Runs each scenario on ranks that are forks of one process, which has imported everything, and prints a line of JSON for
each: its name, and for each rank what it saw, or its traceback.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
from dataclasses import dataclass
from typing import Any

import megatron_on_cpu
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry

from recipe.async_engine.model_engine.megatron_shards import MegatronShards
from recipe.async_engine.model_engine.staging import StagingError, WeightStaging

VOCABULARY = 64
LENGTHS = (13, 24, 7, 20)
RANKS_S = 120


@dataclass(frozen=True)
class Scenario:
    family: str
    tied: bool
    tensor: int = 1
    pipeline: int = 1
    packed: bool = True

    @property
    def name(self) -> str:
        tied = "tied" if self.tied else "untied"
        return f"{self.family}-{tied}-tp{self.tensor}-pp{self.pipeline}-{'packed' if self.packed else 'padded'}"


SCENARIOS = (
    Scenario("qwen3", tied=False),
    Scenario("qwen2", tied=True, packed=False),
    Scenario("qwen3", tied=True, tensor=2),
    Scenario("qwen2", tied=False, tensor=2),
    Scenario("qwen2", tied=True, pipeline=2),
    Scenario("qwen3", tied=False, pipeline=2),
)


def make_model(scenario: Scenario, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": scenario.tied,
        "initializer_range": 0.2,
    }
    if scenario.family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=16, **shape)).float().eval()
    return Qwen2ForCausalLM(Qwen2Config(**shape)).float().eval()


def make_engine(scenario: Scenario, path: str) -> Any:
    parallel = scenario.tensor > 1
    config = McoreEngineConfig(
        tensor_model_parallel_size=scenario.tensor,
        pipeline_model_parallel_size=scenario.pipeline,
        sequence_parallel=parallel,
        vanilla_mbridge=True,
        forward_only=True,
        use_remove_padding=scenario.packed,
        override_transformer_config=megatron_on_cpu.TRANSFORMER_CONFIG | {"sequence_parallel": parallel},
    )
    # verl allows half precision only; the comparison is one of mathematics.
    object.__setattr__(config, "dtype", "float32")
    engine = EngineRegistry.new(
        "language_model",
        "megatron",
        model_config=HFModelConfig(path=path, use_remove_padding=scenario.packed),
        engine_config=config,
        optimizer_config=McoreOptimizerConfig(lr=1e-3, total_training_steps=2, lr_warmup_steps=0),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def largest_difference(engine: Any, scenario: Scenario, seed: int) -> float | None:
    """From the log-probs and entropies of Hugging Face's forward pass; None on a rank that has no output."""

    def ragged(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    mask = torch.ones(len(LENGTHS), 3, dtype=torch.long)
    data = tu.get_tensordict(
        tensor_dict={
            "input_ids": ragged(sequences()),
            "position_ids": ragged([torch.arange(length) for length in LENGTHS]),
            "loss_mask": mask,
            "response_mask": mask.clone(),
            "temperature": torch.ones(len(LENGTHS)),
        },
        non_tensor_dict={
            "calculate_entropy": True,
            "compute_loss": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "use_fused_kernels": False,
            "use_remove_padding": scenario.packed,
        },
    )
    with engine.eval_mode():
        output = engine.infer_batch(data).get("model_output") or {}
    if "log_probs" not in output:
        return None
    reference, largest = make_model(scenario, seed), 0.0
    for row, tokens in enumerate(sequences()):
        with torch.no_grad():
            expected = torch.log_softmax(reference(tokens[None]).logits[0], -1)
        log_probs = expected[:-1].gather(-1, tokens[1:, None])[:, 0]
        entropy = -(expected.exp() * expected).sum(-1)
        for own, right in ((output["log_probs"][row][:-1], log_probs), (output["entropy"][row], entropy)):
            largest = max(largest, (own.float() - right).abs().max().item())
    return largest


def load(staging: WeightStaging, weights: dict[str, torch.Tensor]) -> None:
    """In any order, through one buffer that is used again for each tensor."""
    staging.begin()
    problem = None
    items = list(weights.items())
    random.Random(0).shuffle(items)
    buffer = torch.empty(max(tensor.numel() for tensor in weights.values()))
    try:
        for name, tensor in items:
            staging.put(name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor))
    except StagingError as error:
        problem = error
    buffer.fill_(float("nan"))
    staging.agree(problem)


def refusal(staging: WeightStaging, weights: dict[str, torch.Tensor]) -> str | None:
    try:
        load(staging, weights)
    except StagingError as error:
        return str(error)
    return None


def play(scenario: Scenario, path: str) -> dict[str, Any]:
    engine = make_engine(scenario, path)
    shards = MegatronShards(engine.bridge, engine.module, dist.group.WORLD, scenario.tied)
    staging = WeightStaging(shards, dist.group.WORLD)
    new = dict(make_model(scenario, seed=1).state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    seen: dict[str, Any] = {"at_first": largest_difference(engine, scenario, seed=0)}
    seen["missing"] = refusal(staging, {key: tensor for key, tensor in new.items() if key != name})
    seen["wrong_shape"] = refusal(staging, new | {name: new[name][:-1]})
    seen["unknown"] = refusal(staging, new | {"model.layers.2.mlp.up_proj.weight": new[name]})
    load(staging, new)
    seen["staged"] = largest_difference(engine, scenario, seed=0)
    staging.promote()
    seen["promoted"] = largest_difference(engine, scenario, seed=1)
    exported = {key: tensor.clone() for key, tensor in engine.get_per_tensor_param()[0]}
    seen["exported"] = all(torch.equal(exported[key].float(), new[key]) for key in exported)
    return seen


def run_rank(rank: int, scenario: Scenario, folder: str, results: Any) -> None:
    world = scenario.tensor * scenario.pipeline
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        seen = play(scenario, f"{folder}/model")
    except Exception:
        seen = {"traceback": traceback.format_exc()}
    results.put((rank, seen))
    dist.barrier()


def main(names: list[str]) -> None:
    megatron_on_cpu.install()
    context = multiprocessing.get_context("fork")
    for scenario in SCENARIOS:
        if names and scenario.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            make_model(scenario, seed=0).save_pretrained(f"{folder}/model")
            AutoModelForCausalLM.from_pretrained(f"{folder}/model")
            results = context.Queue()
            ranks = range(scenario.tensor * scenario.pipeline)
            processes = [context.Process(target=run_rank, args=(rank, scenario, folder, results)) for rank in ranks]
            for process in processes:
                process.start()
            seen = dict(results.get(timeout=RANKS_S) for _ in ranks)
            for process in processes:
                process.join(RANKS_S)
            sys.stdout.write(json.dumps({"scenario": scenario.name, "ranks": [seen[rank] for rank in ranks]}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Ranks of a PEFT model under FSDP2, over gloo: what they would send, and the state of the model afterwards.

It is a separate program, started by test_lora_engine.py with a number of ranks. Each rank prints a line of JSON.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from staged_engine import weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.utils.fsdp_utils import merged_lora_context

from recipe.async_engine.weights.lora_engine import merged_parameters
from recipe.async_engine.weights.snapshot import WeightsError

RANKS_S = 120
TIMES = 20


def adapted(**settings: Any) -> PeftModel:
    targets, family = settings.pop("target_modules", "all-linear"), settings.pop("family", "qwen3")
    config = LoraConfig(task_type="CAUSAL_LM", r=6, lora_alpha=16, target_modules=targets, **settings)
    torch.manual_seed(0)
    model = get_peft_model(weights_of(family, 0), config)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model.eval()


def shard(model: PeftModel) -> PeftModel:
    model = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def bits(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def sent(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in merged_parameters(model, "cpu")}


def difference(whole: PeftModel) -> float:
    """Return the largest difference of the sent weights from PEFT's own merge on one rank."""
    found, expected = sent(shard(whole)), copy.deepcopy(whole).merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    return max(float((tensor - expected[name]).abs().max()) for name, tensor in found.items())


def refusal(**settings: Any) -> str:
    try:
        sent(shard(adapted(**settings)))
    except WeightsError as error:
        return str(error)
    return ""


def see() -> dict[str, Any]:
    plain = adapted()
    model = shard(plain)
    before = bits(model)
    seen = {
        "linear": difference(plain),
        "embedding": difference(adapted(target_modules=["embed_tokens", "q_proj"], family="qwen2")),
        "base": max(
            float((tensor - dict(weights_of("qwen3", 0).state_dict())[name]).abs().max())
            for name, tensor in sent(model).items()
        ),
    }
    for _ in range(TIMES):
        sent(model)
    seen["untouched"] = same(before, bits(model))
    broken = merged_parameters(model, "cpu")
    for _ in range(4):
        next(broken)
    seen["untouched_by_a_broken_stream"] = same(before, bits(model))
    with merged_lora_context(model, backup_adapters=True):
        seen["untouched_in_verls_merge"] = same(before, bits(model))
    seen["dora"] = refusal(use_dora=True)
    seen["tied"] = refusal(target_modules=["embed_tokens", "q_proj"])
    seen["bias"] = refusal(lora_bias=True)
    return seen


def run(rank: int, ranks: int, folder: str) -> None:
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(see()))
    dist.destroy_process_group()


def main(ranks: int) -> None:
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [forks.Process(target=run, args=(rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(RANKS_S)
            if process.exitcode != 0:
                os._exit(1)
        for rank in range(ranks):
            sys.stdout.write((Path(folder) / f"{rank}.json").read_text() + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))

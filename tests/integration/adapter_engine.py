# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine that receives LoRA adapters beside the one with which it generates.

It is a separate process, started by test_staged_engine.py, which prints its results as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.save_and_load import get_peft_model_state_dict
from staged_engine import Engine, weights_of

from recipe.async_engine.engines.vllm.staged_adapter import AdapterName, StagedAdapter
from recipe.async_engine.weights.staged import StagingRefused

RANK, ALPHA = 6, 16
CONFIG = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", "bias": "none"}
NOWHERE = "base_model.model.model.layers.0.nowhere"


def adapted(family: str, version: int) -> PeftModel:
    settings = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model = get_peft_model(weights_of(family, 0), settings)
    torch.manual_seed(version)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model.eval()


def stage(worker: Any, family: str, version: int, number: int, odd: bool = False) -> None:
    if not hasattr(worker, "staged"):
        worker.staged = StagedAdapter(worker, CONFIG)
    weights = get_peft_model_state_dict(adapted(family, version))
    if odd:
        part = "base_model.model.model.layers.0.mlp.up_proj"
        weights |= {name.replace(part, NOWHERE): tensor for name, tensor in weights.items() if part in name}
    worker.staged.name = AdapterName(number, version)
    worker.staged.begin()
    worker.staged.load([(name, tensor.detach()) for name, tensor in weights.items()])
    worker.staged.complete(version)


def swap(worker: Any, version: int) -> str | None:
    try:
        worker.staged.swap(version)
    except StagingRefused as error:
        return str(error)
    return None


def main(family: str, folder: Path) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    engine = Engine(family, folder, enable_lora=True, max_loras=1, max_lora_rank=8)

    def differs(number: int, adapter: int, version: int) -> float:
        request = LoRARequest(**AdapterName(number, adapter).request)
        return engine.differs_from(adapted(family, version), lora_request=request)

    seen: dict[str, Any] = {}
    engine.ask(stage, family, 1, 1, True)
    seen["odd"] = engine.ask(swap, 1)
    engine.ask(stage, family, 1, 2)
    seen["first"] = [engine.ask(swap, 1), differs(2, 1, 1)]
    engine.ask(stage, family, 2, 3)
    seen["staged"] = differs(2, 1, 1)
    seen["swapped"] = [engine.ask(swap, 2), differs(3, 2, 2), differs(3, 2, 1)]
    return seen


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = main(sys.argv[2], Path(sys.argv[3]))  # after the device, which is the CPU
    sys.stdout.write(json.dumps(found) + "\n")

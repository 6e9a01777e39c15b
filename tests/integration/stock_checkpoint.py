# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as stock verl writes it, FSDP2 on one rank, by verl's own checkpoint manager."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from recipe.async_engine.trainer.actor_worker import load_weights

CONTENTS = ["model", "optimizer", "extra"]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}


def engine(seed: int) -> Any:
    """Return the parts of verl's training engine that a checkpoint contains."""
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=32, num_key_value_heads=1, tie_word_embeddings=False, **SIZES)
    model = fully_shard(Qwen3ForCausalLM(config), mesh=dist.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    contents = {"save_contents": CONTENTS, "load_contents": CONTENTS}
    manager = FSDPCheckpointManager(model, optimizer, schedule, None, contents)
    made = SimpleNamespace(model=model, optimizer=optimizer, schedule=schedule, checkpoint_manager=manager)
    made.load_checkpoint = manager.load_checkpoint
    return made


def train(made: Any) -> None:
    """Perform a step of the optimizer and of the schedule."""
    made.model(torch.arange(8)[None]).logits.square().mean().backward()
    made.optimizer.step()
    made.optimizer.zero_grad()
    made.schedule.step()


def weights(made: Any) -> dict[str, list[float]]:
    return {name: value.full_tensor().flatten().tolist() for name, value in made.model.state_dict().items()}


def main(folder: Path) -> None:
    """Save a trained engine, start another one from its checkpoint, and print the state of the second."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    stock, ours = engine(1), engine(2)
    train(stock)
    stock.checkpoint_manager.save_checkpoint(str(folder / "global_step_1" / "actor"))
    base = weights(ours)
    load_weights(ours, str(folder / "global_step_1" / "actor"))
    found = {
        "differed": weights(stock) != base,
        "equal": weights(stock) == weights(ours),
        "optimizer": len(ours.optimizer.state_dict()["state"]),
        "lr": ours.optimizer.param_groups[0]["lr"],
        "loads": ours.checkpoint_manager.checkpoint_load_contents,
    }
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

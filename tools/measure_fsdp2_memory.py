# SPDX-License-Identifier: Apache-2.0
"""Measures the peak of an FSDP2 update on a CPU: `python tools/measure_fsdp2_memory.py MODEL RANKS TOKENS`.

transformers' model of that shape, wrapped as verl's engine wraps it, runs forward and backward over two micro-batches
of TOKENS tokens on rank 0 of RANKS. It uses fake tensors, which have sizes and no contents, under torch's own
`FSDPMemTracker`, which follows every allocation. Log-probs are a function of the logits whose backward pass writes into
them, as flash-attn's cross entropy does in verl. Adam's moments, which exist from the first step on, are added. It
prints bytes by kind.
"""

import argparse
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.plan.memory.shape import known_model


class InPlaceLogProbs(torch.autograd.Function):
    """Returns one number per row of the logits; the gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits[:, 0].float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        return logits.detach().zero_()


def measure(name: str, ranks: int, tokens: int) -> dict[str, int]:
    """Return bytes by kind at the peak of forward and backward pass, and those of Adam's moments."""
    known = known_model(name)
    if known is None:
        raise SystemExit(f"{name}: no model of plan/memory/shape.py")
    sizes = dict(known)
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    config._attn_implementation = "sdpa"
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        wrapped = list(model.model.layers) + ([] if config.tie_word_embeddings else [model.model.embed_tokens])
        for module in (*wrapped, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        share = sum(parameter.to_local().numel() * 4 for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(())
        with tracker:
            ids, positions = torch.zeros((1, tokens), dtype=torch.long), torch.arange(tokens).unsqueeze(0)
            for _ in range(2):
                # Nothing else may hold the logits, so that the backward pass frees their memory.
                log_probs = InPlaceLogProbs.apply(
                    model(input_ids=ids, position_ids=positions, use_cache=False).logits.squeeze(0)
                )
                log_probs.sum().backward()
                tracker.reset_mod_stats()
            peak = next(iter(tracker.get_tracker_snapshot("peak").values()))
    kinds = {str(kind).rpartition(".")[2].lower(): amount for kind, amount in peak.items() if amount}
    return kinds | {"optimizer": 2 * share, "total": peak["Total"] + 2 * share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("ranks", type=int)
    parser.add_argument("tokens", type=int)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps(measure(chosen.model, chosen.ranks, chosen.tokens)) + "\n")


if __name__ == "__main__":
    main()

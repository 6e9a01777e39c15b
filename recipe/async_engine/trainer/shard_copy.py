# SPDX-License-Identifier: Apache-2.0
"""A training rank's copy of its shards, in memory that is used again for the next one.

Why it is no part of the copy that is sent: that one is whole, at rank 0 alone, and in the dtype of the rollout, while
training goes on from what is restored, which are each rank's shards bit for bit, in fp32 as a rule. Whoever computes
log-probs by the published weights goes back to the trained ones afterwards.

Contract: as `verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu`, whose form this has, but that a copy is never the live
tensor (verl's is where that is on the CPU already, :1180), and that all shards are copied at once, into one piece of
pinned memory, and waited for once: verl's waits for each, and has new memory for it. Shown by
tests/integration/test_published_weights.py.
"""

from __future__ import annotations

from typing import Any

import torch

from recipe.async_engine.weights.arena import in_one_piece, settle

SHARDED = ("fsdp2", "veomni")
"""Strategies whose parameters are DTensors."""


class ShardCopy:
    """See the module's contract."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, module: torch.nn.Module) -> tuple[dict[str, tuple[torch.Tensor, Any]], Any]:
        """Copy what this rank has of the module's parameters; returns what verl's loading takes."""
        parameters = dict(module.named_parameters())
        shards: list[torch.Tensor] = [
            getattr(parameter, "_local_tensor", parameter) for parameter in parameters.values()
        ]
        forms = [(shard.shape, shard.dtype) for shard in shards]
        if forms != [(tensor.shape, tensor.dtype) for tensor in self._tensors]:
            self._tensors = in_one_piece(forms, pinned=torch.cuda.is_available())
        for tensor, shard in zip(self._tensors, shards, strict=True):
            tensor.copy_(shard, non_blocking=True)
        settle()
        specs = [getattr(parameter, "_spec", None) for parameter in parameters.values()]
        copies = dict(zip(parameters, zip(self._tensors, specs, strict=True), strict=True))
        return copies, next(spec for spec in specs if spec is not None)

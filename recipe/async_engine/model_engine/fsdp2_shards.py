# SPDX-License-Identifier: Apache-2.0
"""The local shards of an FSDP2 model, by Hugging Face's names.

Every rank sees every full tensor and cuts its own shard out of it, without a collective. Tensors that share their
storage (tied embeddings) need to come under one of their names only. Shown by tests/integration/test_staged_shards.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.utils.model import convert_weight_keys

from recipe.async_engine.weights.staged import StagingRefused


class FSDP2Shards:
    """`recipe.async_engine.model_engine.staged_shards.Shards` of a module under ``fully_shard``."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._live: dict[str, torch.Tensor] = convert_weight_keys(dict(module.state_dict()), module)
        self._local = {name: _local(tensor) for name, tensor in self._live.items()}
        self._accepted: set[int] = set()

    def accept(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        if name not in self._live:
            raise StagingRefused(f"the model has no tensor {name}")
        live, local = self._live[name], self._local[name]
        if tensor.shape != live.shape:
            raise StagingRefused(f"tensor {name} has the shape {tuple(tensor.shape)}, not {tuple(live.shape)}")
        self._accepted.add(local.data_ptr())
        return [(local, _shard_like(live, tensor))]

    def missing(self) -> list[str]:
        """A rank that has nothing of a tensor misses nothing: another rank does."""
        held = {name: local.data_ptr() for name, local in self._local.items() if local.numel() > 0}
        return [name for name, address in held.items() if address not in self._accepted]

    def reset(self) -> None:
        self._accepted.clear()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_like(live: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    if not isinstance(live, DTensor):
        return full
    placed = distribute_tensor(full.to(live.device), live.device_mesh, live.placements, src_data_rank=None)
    return placed.to_local()

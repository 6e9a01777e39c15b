# SPDX-License-Identifier: Apache-2.0
"""The next weights beside the live ones of a sharded model: one rank's part, which is complete when every rank's is.

A stream that one rank cannot take is refused on all ranks alike, with the same error. Buffers are allocated once: as
much again as the local shards, on their device or in host memory. Shown by tests/integration/test_staged_shards.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist

from recipe.async_engine.weights.staged import NamedTensors, StagedWeights


class Shards(Protocol):
    """What a rank has of a model, by the names that the stream uses (Hugging Face's)."""

    def accept(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Take a full tensor of the stream, which is valid during this call only.

        Returns:
            Pairs of a live local shard and its new value, of equal shape; none while parts of it are still to come.

        Raises:
            StagingRefused: the model has no such tensor, or it has another shape.
        """

    def missing(self) -> list[str]:
        """Names that must still come before every local shard has its new value."""

    def reset(self) -> None:
        """Forget what was accepted."""


class StagedShards(StagedWeights):
    """See the module's contract.

    Args:
        shards: this rank's part of the model.
        group: all ranks of the model, for agreement on the host (gloo).
        in_host: keep the staged weights in host memory instead of beside the live ones.
    """

    def __init__(self, shards: Shards, group: dist.ProcessGroup, in_host: bool = False) -> None:
        self._shards = shards
        self._group = group
        self._in_host = in_host
        # By the address of the live shard: (live, staged).
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _begin(self) -> None:
        self._shards.reset()

    def _load(self, weights: NamedTensors) -> None:
        for name, tensor in weights:
            for live, new in self._shards.accept(name, tensor):
                if live.numel() == 0:
                    # A rank may have nothing of a small parameter; all such shards have the address 0.
                    continue
                if live.data_ptr() not in self._buffers:
                    device = torch.device("cpu") if self._in_host else live.device
                    self._buffers[live.data_ptr()] = live, torch.empty_like(live, device=device)
                self._buffers[live.data_ptr()][1].copy_(new)

    def _lack(self) -> str | None:
        missing = self._shards.missing()
        return f"{len(missing)} tensors never came, among them {missing[0]}" if missing else None

    def _agreed(self, problem: str | None) -> str | None:
        self._shards.reset()
        verdicts: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(verdicts, problem, group=self._group)
        problems = [f"rank {rank}: {verdict}" for rank, verdict in enumerate(verdicts) if verdict is not None]
        return "; ".join(problems) or None

    def _swap(self) -> None:
        for live, staged in self._buffers.values():
            live.copy_(staged)

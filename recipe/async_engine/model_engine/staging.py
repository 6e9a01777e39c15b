# SPDX-License-Identifier: Apache-2.0
"""New weights beside the live ones of a sharded model, swapped in only when every rank has every one of them.

Contract: until `promote` nothing of the live weights changes, and after it nothing of the old ones is left. A stream
that is cut off, lacks a tensor, or has one of a wrong shape or unknown name is refused on all ranks alike, with an
error that names the tensor; the next stream starts afresh. Buffers are allocated once: as much again as the local
shards, on their device or in host memory. Shown by tests/integration/test_staging.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist

from recipe.async_engine.core.errors import RecipeError


class StagingError(RecipeError):
    """A stream of weights that the model cannot take; the live weights are unchanged."""


class Shards(Protocol):
    """What a rank has of a model, by the names that the stream uses (Hugging Face's)."""

    def accept(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Take a full tensor of the stream, which is valid during this call only.

        Returns:
            Pairs of a live local shard and its new value, of equal shape; none while parts of it are still to come.

        Raises:
            StagingError: the model has no such tensor, or it has another shape.
        """

    def missing(self) -> list[str]:
        """Names that must still come before every local shard has its new value."""

    def reset(self) -> None:
        """Forget what was accepted."""


class WeightStaging:
    """The staged weights of one rank.

    Args:
        shards: this rank's part of the model.
        group: all ranks of the model, for agreement on the host (gloo).
        host: keep the staged weights in host memory instead of beside the live ones.
    """

    def __init__(self, shards: Shards, group: dist.ProcessGroup, host: bool = False) -> None:
        self._shards = shards
        self._group = group
        self._host = host
        # By the address of the live shard: (live, staged).
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._complete = False

    def begin(self) -> None:
        """A stream starts; whatever was staged before and not promoted is dropped."""
        self._complete = False
        self._shards.reset()

    @torch.no_grad()
    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Stage one tensor of the stream. The other ranks learn in `agree` of what `Shards.accept` raises."""
        for live, new in self._shards.accept(name, tensor):
            if live.numel() == 0:
                # A rank may have nothing of a small parameter; all such shards have the address 0.
                continue
            if live.data_ptr() not in self._buffers:
                device = torch.device("cpu") if self._host else live.device
                self._buffers[live.data_ptr()] = live, torch.empty_like(live, device=device)
            self._buffers[live.data_ptr()][1].copy_(new)

    def agree(self, problem: BaseException | None = None) -> None:
        """End of the stream, on all ranks: the staged weights are complete, or are dropped everywhere.

        Args:
            problem: what ended this rank's stream early, if anything did.

        Raises:
            StagingError: some rank lacks a tensor or had a problem; the message is the same on all ranks.
        """
        missing = [] if problem is not None else self._shards.missing()
        own = str(problem) if problem is not None else None
        if missing:
            own = f"{len(missing)} tensors never came, among them {missing[0]}"
        verdicts: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(verdicts, own, group=self._group)
        problems = [f"rank {rank}: {verdict}" for rank, verdict in enumerate(verdicts) if verdict is not None]
        self._shards.reset()
        if problems:
            raise StagingError(f"the weights were refused, the old ones stay: {'; '.join(problems)}") from problem
        self._complete = True

    @torch.no_grad()
    def promote(self) -> None:
        """Make the staged weights the live ones. Nothing may be computed meanwhile."""
        if not self._complete:
            raise StagingError("there are no complete weights to swap in")
        for live, staged in self._buffers.values():
            live.copy_(staged)
        self._complete = False

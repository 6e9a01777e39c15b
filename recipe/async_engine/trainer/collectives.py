# SPDX-License-Identifier: Apache-2.0
"""How long a training rank's FSDP2 collectives take, which is where it waits for slower ranks.

Contract: measured where a collective blocks until every rank is there, as on CPUs; on an accelerator it is only
launched, so nothing is said of it. What a rank spends beyond the one that spends least is its wait: that one, the
slowest, waits for nobody. Shown by tests/integration/test_collectives.py, with two real ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class CollectiveTime:
    """Seconds of this rank's collectives so far, by FSDP2's own extension points.

    Attributes:
        seconds: all of them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, module: torch.nn.Module) -> None:
        """Count the collectives of this model's FSDP2 parts from now on."""
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(_Timed(DefaultAllGather(), self))
                part.set_custom_reduce_scatter(_Timed(DefaultReduceScatter(), self))


class _Timed:
    """A collective of FSDP2, with its time counted."""

    def __init__(self, collective: Any, of_rank: CollectiveTime) -> None:
        self._collective, self._of_rank = collective, of_rank

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._collective.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return self._collective(*args, **kwargs)
        finally:
            self._of_rank.seconds += time.monotonic() - began


def mean_wait(spent: Sequence[float]) -> float:
    """Seconds that a rank waited for the slowest one, mean over all, by what each spent in collectives."""
    return sum(spent) / len(spent) - min(spent)

# SPDX-License-Identifier: Apache-2.0
"""What two real ranks say of their FSDP2 collectives shows which of them is the slow one, and how slow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipe.async_engine.trainer.collectives import CollectiveTime, mean_wait

SLOW, SLEEP_S, STEPS = 1, 0.5, 3


def rank_of_two(rank: int, folder: str) -> None:
    """Steps of a small model, before each of which one rank does something else."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    collectives = CollectiveTime()
    collectives.watch(model)
    model(torch.ones(4, 8)).sum().backward()
    before = collectives.seconds
    for _ in range(STEPS):
        if rank == SLOW:
            time.sleep(SLEEP_S)
        model(torch.ones(4, 8)).sum().backward()
    torch.save(collectives.seconds - before, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def test_the_quick_rank_waits_for_the_slow_one(tmp_path: Path) -> None:
    mp.start_processes(rank_of_two, (str(tmp_path),), nprocs=2, start_method="fork")
    spent = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    waited = spent[1 - SLOW] - spent[SLOW]
    # Whatever else the machine does, the quick rank may come late too, but hardly for half of the time.
    assert waited > STEPS * SLEEP_S / 2
    # One of two ranks waited.
    assert mean_wait(spent) == pytest.approx(waited / 2)


def test_the_mean_wait_is_of_those_that_spend_more_than_the_slowest() -> None:
    assert mean_wait([1.0, 1.0]) == 0
    assert mean_wait([1.0, 3.0, 2.0]) == 1.0

# SPDX-License-Identifier: Apache-2.0
"""Copies of the weights, kept or sent: the worker's own methods over FSDP2 shards, on one and two ranks."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.core.errors import CheckpointError
from recipe.async_engine.trainer.actor_worker import ActorWorker, PublishedWeights
from recipe.async_engine.weights.snapshot import Wire

RANKS_S = 120


def worker_of(rows: int = 5, gathers: bool = False) -> ActorWorker:
    """A rank's worker around a sharded module; of two ranks the second has nothing of the bias."""
    module = torch.nn.Linear(3, rows)
    module.offset = torch.nn.Parameter(torch.zeros(1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(module, mesh=mesh, reshard_after_forward=not gathers)
    worker = ActorWorker.__new__(ActorWorker)
    worker._rank, worker._world_size, worker._strategy_handlers = dist.get_rank(), dist.get_world_size(), None
    worker.config = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"))
    worker.actor = SimpleNamespace(engine=SimpleNamespace(module=module))
    return worker


def fill(worker: ActorWorker, value: float) -> None:
    with torch.no_grad():
        for parameter in worker.actor.engine.module.parameters():
            parameter.fill_(value)


def holds(worker: ActorWorker, value: float) -> bool:
    parameters = list(worker.actor.engine.module.parameters())
    return all(bool((parameter.full_tensor() == value).all()) for parameter in parameters)


def published(worker: ActorWorker, **changes: object) -> PublishedWeights:
    plan = SimpleNamespace(**({"batches_per_version": 4, "proximal": Proximal.BYPASS, "hybrid_replicas": 0} | changes))
    return PublishedWeights(worker, plan, saves=bool(changes.get("saves", True)))


class CheckpointEngine:
    """Trains on in the middle of each transfer."""

    def __init__(self, worker: ActorWorker) -> None:
        self.worker = worker

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int) -> dict[str, Any]:
        sent = {}
        for name, tensor in weights:
            fill(self.worker, 100.0)
            sent[name] = tensor
        return {"version": global_steps, "sent": sent}


def check_what_is_sent(worker: ActorWorker, rank: int) -> None:
    module = worker.actor.engine.module
    worker.actor.engine.get_per_tensor_param = lambda: (
        ((name, parameter.full_tensor()) for name, parameter in module.state_dict().items()),
        None,
    )
    worker.config.rollout = SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="recipe_gloo"))
    worker.checkpoint_engine = CheckpointEngine(worker)
    for version in (1, 2):
        fill(worker, float(version))
        worker.snapshot_weights(version, Wire(torch.bfloat16))
        fill(worker, 99.0)
        outcome = asyncio.run(worker.send_snapshot(version))
        assert outcome["version"] == version and len(outcome["sent"]) == 3
        for tensor in outcome["sent"].values():
            assert tensor.dtype == torch.bfloat16
            assert tensor.is_meta if rank else bool((tensor == version).all())


def check_gathered_weights() -> None:
    """A forward pass without a backward pass leaves the weights gathered, if FSDP2 is not to reshard after it."""
    worker = worker_of(gathers=True)
    kept = published(worker)
    fill(worker, 1.0)
    kept.keep()
    fill(worker, 2.0)
    with torch.no_grad(), kept.in_use():
        worker.actor.engine.module(torch.zeros(1, 3))
        assert not hasattr(worker.actor.engine.module.weight, "full_tensor"), "they are gathered"
    assert holds(worker, 2.0)
    with torch.no_grad():
        worker.actor.engine.module(torch.zeros(1, 3))
    kept.keep()
    fill(worker, 3.0)
    with kept.in_use():
        assert holds(worker, 2.0)


def scenario(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    worker = worker_of()
    kept = published(worker)
    with pytest.raises(CheckpointError, match=rf"training rank {rank} has no copy 'published'"), kept.in_use():
        pass
    fill(worker, 1.0)
    kept.keep()
    fill(worker, 2.0)
    with pytest.raises(ZeroDivisionError), kept.in_use():
        assert holds(worker, 1.0)
        raise ZeroDivisionError
    assert holds(worker, 2.0), "what was trained comes back, whatever happens meanwhile"
    kept.save(folder)

    again = worker_of()
    fill(again, 2.0)
    kept = published(again)
    kept.load(folder)
    assert holds(again, 2.0), "only a publication uses them"
    fill(again, 3.0)
    with kept.in_use():
        assert holds(again, 1.0)
    assert holds(again, 3.0)
    check_gathered_weights()
    check_what_is_sent(worker_of(), rank)
    with pytest.raises(CheckpointError, match="another model"):
        published(worker_of(rows=8)).load(folder)
    again._world_size = world + 1
    with pytest.raises(CheckpointError, match=f"rank_{rank}_of_{world + 1}.pt is not there"):
        kept.load(folder)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
def test_copies_are_the_weights_as_published_also_from_disk_and_an_absent_one_is_an_error(
    world: int, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=scenario, args=(rank, world, str(tmp_path))) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(RANKS_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"batches_per_version": 1, "proximal": Proximal.RECOMPUTE}, False),
        ({"proximal": Proximal.RECOMPUTE, "saves": False}, True),
        ({"proximal": Proximal.SERVER, "saves": False}, True),
        ({"proximal": Proximal.LOGLINEAR, "saves": False}, False),
        ({"proximal": Proximal.BYPASS, "saves": True}, True),
        ({"hybrid_replicas": 1, "saves": False}, True),
        ({"batches_per_version": 1, "hybrid_replicas": 1}, False),
    ],
)
def test_memory_is_taken_only_where_the_trainer_may_compute_or_a_checkpoint_may_need_them(
    changes: dict[str, object], kept: bool
) -> None:
    calls: list[str] = []
    published(SimpleNamespace(save_model_to_cpu=calls.append), **changes).keep()
    assert calls == ["published"] * kept


def test_what_verl_offloads_has_arrived_before_it_is_read_or_written_and_copies_are_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`offload_fsdp2_model_to_cpu` leaves copies to host memory under way."""
    asked: list[str] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.extend(["copy"] * (function is torch.ops.aten.copy_.default))
            return function(*args, **(kwargs or {}))

    stream = SimpleNamespace(synchronize=lambda: asked.append("wait"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    worker = ActorWorker.__new__(ActorWorker)
    worker._rank, worker.config = 0, SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"))
    shards = {name: SimpleNamespace(_local_tensor=torch.ones(5), _spec="spec") for name in "abc"}
    module = SimpleNamespace(named_parameters=shards.items, modules=list)
    worker.actor = SimpleNamespace(engine=SimpleNamespace(module=module))
    worker._strategy_handlers = (None, lambda *_: asked.append("load"))
    with Copies():
        worker.save_model_to_cpu("published")
    assert asked == ["wait", "copy", "copy", "copy", "wait"]
    first, _ = worker.cpu_saved_models["published"]
    worker.save_model_to_cpu("published")
    again, _ = worker.cpu_saved_models["published"]
    assert all(again[name][0].data_ptr() == first[name][0].data_ptr() for name in shards), "its memory is used again"
    asked.clear()
    worker.restore_model_from_cpu("published")
    assert asked == ["wait", "load"]

# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks and receivers, each a Ray actor with one checkpoint engine, and the weight publisher over them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import nccl_on_cpu
import ray
import torch
from remote_fakes import Handle
from verl.checkpoint_engine.base import CheckpointEngineRegistry, _worker_cls
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from recipe.async_engine.config.sections import Weights
from recipe.async_engine.core.errors import WeightLoadError
from recipe.async_engine.weights.checksum import StreamChecksum, SummedSender
from recipe.async_engine.weights.publisher import WeightPublisher
from recipe.async_engine.weights.snapshot import WeightSnapshot, Wire

BUCKET_BYTES = 4096
MEBIBYTES_OF_BULK = 32
ANSWER_S = 60.0


@dataclass(frozen=True)
class Engine:
    """A checkpoint engine, as a run's settings select it."""

    backend: str
    module: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    is_nccl: bool = False
    device: str = "cpu"
    accelerators: float = 0
    """Number of accelerators that each member takes."""
    bulk_mebibytes: int = 0
    """Size of further weights, besides those that are compared bit for bit."""

    @property
    def how(self) -> Weights:
        return Weights(publish="inline", at_swap="interrupt")

    def load(self) -> None:
        """Register it in this process, in which its name may have belonged to another engine."""
        if self.is_nccl:
            nccl_on_cpu.install(ours=self.module is not None)
        import_external_libs(self.module)

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Return all weights of a version, on the device."""
        small = {name: tensor.to(self.device) for name, tensor in make_weights(version).items()}
        size, count = MEBIBYTES_OF_BULK << 18, self.bulk_mebibytes // MEBIBYTES_OF_BULK
        bulk = {f"bulk.{number}": torch.full((size,), version + number / 7) for number in range(count)}
        return small | {name: tensor.to(self.device) for name, tensor in bulk.items()}

    def bytes_sent(self, version: int) -> int:
        return sum(tensor.nbytes for tensor in self.weights(version).values())

    def actor(self, kind: type) -> Any:
        return ray.remote(kind).options(num_cpus=0, num_gpus=self.accelerators)

    def new(self, **settings: Any) -> Any:
        self.load()
        return CheckpointEngineRegistry.new(self.backend, **{"bucket_size": BUCKET_BYTES, **self.settings, **settings})


def make_weights(version: int) -> dict[str, torch.Tensor]:
    """Return weights with two tensors larger than a bucket, and several buckets in all."""
    random = torch.Generator().manual_seed(version)
    layers = {f"layer.{number}": torch.randn(20, 30, generator=random) for number in range(6)}
    return {
        "embed": torch.randn(300, 16, generator=random),
        "norm": torch.randn(16, generator=random).bfloat16(),
        **layers,
        "counter": torch.tensor([version, 1 << 40]),
        "lm_head": torch.randn(70, 40, generator=random).bfloat16(),
    }


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).cpu().numpy()))
        for name, tensor in tensors.items()
    }


class Member:
    """Calls its engine as verl's workers do."""

    def __init__(self, engine: Engine, **settings: Any) -> None:
        self.engine = engine.new(**settings)

    def execute_checkpoint_engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.engine, method)(*arguments, **named)

    def buffers(self) -> list[Any]:
        """Return the remaining references to its buckets."""
        return [getattr(self.engine, name, None) for name in ("send_buf", "recv_buf")]

    def group(self) -> str:
        """Return the name of its group."""
        return self.engine.topology_epoch() if hasattr(self.engine, "topology_epoch") else self.engine.group_name


class TrainerRank(Member):
    def __init__(self, engine: Engine, rank: int) -> None:
        super().__init__(engine, is_master=rank == 0)
        self.weights = engine.weights
        self.snapshot = WeightSnapshot(rank == 0)
        if rank == 0:
            self.engine = SummedSender(self.engine)
        self.names: list[list[str]] = []
        self.fails_at: str | None = None

    async def update_weights(self, global_steps: int, mode: str) -> Any:
        self.names.append([])
        return await self.engine.send_weights(self._weights(global_steps), global_steps=global_steps) or {}

    def snapshot_weights(self, version: int, wire: Wire) -> None:
        self.snapshot.take(self.weights(version).items, version, wire)

    async def send_snapshot(self, version: int) -> Any:
        with self.snapshot.stream(version) as weights:
            return await self.engine.send_weights(weights, global_steps=version) or {}

    def _weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.weights(version).items():
            if name == self.fails_at:
                self.fails_at = None
                raise ValueError("no such shard")
            self.names[-1].append(name)
            yield name, tensor

    def fail_at(self, name: str) -> None:
        """Fail the next time that this tensor is requested."""
        self.fails_at = name

    def consumed_names(self) -> list[list[str]]:
        """Return the names of the weights consumed in each transfer since the last call."""
        names, self.names = self.names, []
        return names


class Receiver(Member):
    """Receives weights on a thread, as this package's weight workers do.

    ``fault``: what happens once at its third tensor: it dies, freezes, or refuses; or it never joins a group.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.fault: str | None = None
        self.received: dict[str, torch.Tensor] = {}
        self.wrong: list[str] = []

    def execute_checkpoint_engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        if method == "init_process_group" and self.fault == "die before joining":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute_checkpoint_engine(method, *arguments, **named)

    async def stage_weights(self, global_steps: int) -> str:
        return await asyncio.to_thread(lambda: asyncio.run(self._receive(global_steps)))

    async def _receive(self, version: int) -> str:
        checksum, received, expected = StreamChecksum(), {}, bits(make_weights(version))
        async for name, tensor in checksum.watching(self.engine.receive_weights(global_steps=version)):
            if name not in expected:
                continue
            received[name] = tensor.clone()
            if bits({name: tensor})[name] != expected[name]:
                self.wrong.append(name)
            if len(received) == 3 and self.fault is not None:
                fault, self.fault = self.fault, None
                if fault == "refuse":
                    raise WeightLoadError("bad shape")
                os.kill(os.getpid(), signal.SIGKILL if fault == "die" else signal.SIGSTOP)
        self.received = received
        return checksum.value()

    def meet(self, fault: str) -> None:
        self.fault = fault

    def wrong_tensors(self) -> list[str]:
        """Return the names of all tensors that its engine has delivered with wrong values."""
        return self.wrong

    def loaded(self) -> dict[str, Any]:
        return bits(self.received)

    def pid(self) -> int:
        return os.getpid()


class Replica:
    """A rollout replica that consists of one receiver."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.receiver = engine.actor(Receiver).remote(engine)
        self.replica_rank = rank
        self.server_address = f"server-{rank}"
        self.server_handle = Handle(
            SimpleNamespace(leave_routing=lambda: None, swap=lambda version, checksum: None, wide_parameters=lambda: [])
        )
        self.workers, self.servers = [self.receiver], []

    def ask(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.receiver, method).remote(*arguments), timeout=ANSWER_S)

    async def nothing(self) -> None: ...

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


class Trainer:
    """The trainer's ranks, which outlive their replicas."""

    def __init__(self, engine: Engine, ranks: int = 2) -> None:
        self.ranks = [engine.actor(TrainerRank).remote(engine, rank) for rank in range(ranks)]
        self.group = group_of(self.ranks)

    def stop(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(rank, method).remote(*arguments) for rank in self.ranks], timeout=ANSWER_S)


class Publisher(WeightPublisher):
    """Counts its ``transfers``, including failed ones."""

    transfers = 0

    async def _load(self, *arguments: Any) -> Any:
        self.transfers += 1
        return await super()._load(*arguments)


class TrainerGroup(RayWorkerGroup):
    """A worker group with the methods that this package's training workers add to verl's."""

    def snapshot_weights(self, *arguments: Any) -> list[Any]:
        return [worker.snapshot_weights.remote(*arguments) for worker in self.workers]

    def send_snapshot(self, *arguments: Any) -> list[Any]:
        return [worker.send_snapshot.remote(*arguments) for worker in self.workers]


def group_of(actors: list[Any]) -> RayWorkerGroup:
    return TrainerGroup(worker_handles=actors, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))


class Fleet:
    """A trainer, its replicas and their publisher."""

    def __init__(self, engine: Engine, trainer: Trainer, receivers: int, timeout_s: float = 20.0) -> None:
        engine.load()
        self.engine, self.trainer = engine, trainer
        config = CheckpointEngineConfig(backend=engine.backend, custom_backend_module=engine.module)
        balancer = Handle(GlobalRequestLoadBalancer({}))
        self.publisher = Publisher(config, trainer.group, [], balancer, timeout_s, engine.how)
        self.replicas: list[Replica] = []
        for _ in range(receivers):
            self.join()

    def join(self) -> Replica:
        self.replicas.append(Replica(self.engine, len(self.replicas)))
        self.publisher.add_replicas(self.replicas[-1:])
        return self.replicas[-1]

    def leave(self, replica: Replica) -> None:
        """Exclude a replica from further syncs while it lives on."""
        self.publisher.remove_replicas([replica])
        known = self.publisher.known
        known.records = [record for record in known.records if record.replica is not replica]

    @property
    def routed(self) -> list[int]:
        return [record.replica.replica_rank for record in self.publisher.known.records if record.routed]

    def stop(self) -> None:
        for replica in self.replicas:
            ray.kill(replica.receiver)

# SPDX-License-Identifier: Apache-2.0
"""Two trainer ranks that send weights while FSDP2 trains on both of them, on any device.

Each rank is an actor like a training worker: calls about sending use a concurrency group of their own. It sends its
model's parameters and further `Engine.bulk_mebibytes`, from the copy that the publisher makes it take, and trains
without a pause: collectives of several steps are queued at any time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
import torch
import torch.distributed as dist
from engine_fleet import ANSWER_S, Engine, Fleet, Trainer, TrainerGroup, TrainerRank, bits, make_weights
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine.base import _worker_cls
from verl.single_controller.ray import RayClassWithInitArgs

from recipe.async_engine.trainer.actor_worker import BESIDE_METHODS, BESIDE_TRAINING
from recipe.async_engine.weights.checksum import StreamChecksum
from recipe.async_engine.weights.snapshot import WeightSnapshot, Wire

RANKS = 2
ROWS = 16
# Number of steps that are queued before a rank checks whether it must stop, which waits for them.
QUEUED_STEPS = 4
STEPS_ALONE = 5 * QUEUED_STEPS


class TrainingRank(TrainerRank):
    """``meeting``: a file through which the ranks find each other. ``width``, ``layers``: the model's."""

    def __init__(self, engine: Engine, rank: int, meeting: str, width: int, layers: int) -> None:
        super().__init__(engine, rank)
        self._on_cpu = engine.device == "cpu"
        if self._on_cpu:
            torch.set_num_threads(1)
            self._device = torch.device("cpu")
        else:
            # Each actor sees only its own accelerator.
            self._device = torch.device(engine.device, 0)
            torch.cuda.set_device(self._device)
        backend = "gloo" if self._on_cpu else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *[torch.nn.Linear(width, width, bias=False, device=self._device) for _ in range(layers)]
        )
        mesh = dist.init_device_mesh(engine.device, (RANKS,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        self._model = fully_shard(model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._rows = torch.randn(ROWS, width, device=self._device)
        from_host = self._on_cpu or engine.backend == "recipe_gloo"
        self.snapshot = WeightSnapshot(rank == 0, None if from_host else self._device)
        self._stopping = threading.Event()

    def snapshot_weights(self, version: int, wire: Wire) -> str:
        """Copy the weights; return their checksum."""
        checksum = StreamChecksum()
        self.snapshot.take(checksum.passing(self._all_weights(version)), version, wire)
        return checksum.value()

    def _all_weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield f"model.{name}", parameter.full_tensor().detach()
        yield from self.weights(version).items()

    def train(self, steps: int | None) -> list[float]:
        """Train this many steps, or until `stop_training`; return when each of them had been queued."""
        asked: list[float] = []
        while len(asked) != steps:
            self._optimizer.zero_grad()
            self._model(self._rows).square().mean().backward()
            self._optimizer.step()
            asked.append(time.monotonic())
            if len(asked) % QUEUED_STEPS == 0 and self._is_over():
                break
        return asked

    def _is_over(self) -> bool:
        """Agree on whether to stop, so that the ranks stop after the same step."""
        stopping = torch.tensor([float(self._stopping.is_set())], device=self._device)
        dist.all_reduce(stopping, op=dist.ReduceOp.MAX)
        return bool(stopping.item())

    async def stop_training(self) -> None:
        self._stopping.set()

    async def train_on(self) -> None:
        self._stopping.clear()


class TrainingGroup(TrainerGroup):
    """A group that makes calls about sending beside training, as `recipe.async_engine.trainer.verl_trainer` does.

    copied: for each rank, the checksum of the weights that it copied last.
    """

    copied: list[Any]

    def _execute_remote_single_worker(self, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        if method_name.endswith(BESIDE_METHODS):
            return getattr(worker, method_name).options(concurrency_group=BESIDE_TRAINING).remote(*args, **kwargs)
        return super()._execute_remote_single_worker(worker, method_name, *args, **kwargs)

    def snapshot_weights(self, *arguments: Any) -> list[Any]:
        self.copied = super().snapshot_weights(*arguments)
        return self.copied

    def send_snapshot(self, *arguments: Any) -> list[Any]:
        beside = [worker.send_snapshot.options(concurrency_group=BESIDE_TRAINING) for worker in self.workers]
        return [method.remote(*arguments) for method in beside]


class TrainingTrainer(Trainer):
    """A trainer of `RANKS` ranks that train."""

    def __init__(self, engine: Engine, *of_each: Any) -> None:
        kind = ray.remote(concurrency_groups={BESIDE_TRAINING: len(BESIDE_METHODS)})(TrainingRank)
        options = {"num_cpus": 0, "num_gpus": engine.accelerators}
        self.ranks = [kind.options(**options).remote(engine, rank, *of_each) for rank in range(RANKS)]
        self.group = TrainingGroup(worker_handles=self.ranks, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))

    def beside(self, method: str) -> None:
        ray.get(
            [getattr(rank, method).options(concurrency_group=BESIDE_TRAINING).remote() for rank in self.ranks],
            timeout=ANSWER_S,
        )


def send_beside_training(engine: Engine, meeting: str, width: int, layers: int, versions: int) -> dict[str, Any]:
    """Send ``versions`` versions and return figures of the last one.

    It checks that each version arrives as it was when it was copied, while both ranks train.
    """
    trainer = TrainingTrainer(engine, meeting, width, layers)
    fleet = Fleet(engine, trainer, receivers=1, timeout_s=180.0)
    publisher, replica = fleet.publisher, fleet.replicas[0]
    publisher.weights = replace(publisher.weights, publish="beside")
    seen: dict[str, Any] = {}
    try:
        trainer.ask("train", STEPS_ALONE)
        alone = trainer.ask("train", STEPS_ALONE)[0]
        for version in range(1, versions + 1):
            seen = _sent(trainer, publisher, version)
            assert replica.ask("wrong_tensors") == []
            assert replica.ask("loaded") == bits(make_weights(version))
    finally:
        fleet.stop()
        trainer.stop()
    nbytes = engine.bytes_sent(versions) + 4 * layers * width**2
    return {
        "engine": engine.backend,
        "gigabytes": round(nbytes / 1e9, 3),
        "gigabytes_per_second": round(nbytes / 1e9 / seen["seconds"], 3),
        "steps_a_second_alone": round((len(alone) - 1) / (alone[-1] - alone[0]), 2),
    } | seen


def _sent(trainer: TrainingTrainer, publisher: Any, version: int) -> dict[str, Any]:
    began = time.monotonic()
    publisher.snapshot(version)
    copy_s = time.monotonic() - began
    trainer.beside("train_on")
    training = [rank.train.remote(None) for rank in trainer.ranks]
    began = time.monotonic()
    try:
        staged = publisher.stage(version)
        ended = time.monotonic()
    finally:
        trainer.beside("stop_training")
    steps = [[at for at in asked if began < at < ended] for asked in ray.get(training, timeout=ANSWER_S)]
    publisher.swap(staged)
    publisher.resume(staged)
    # The model has changed since the copy.
    assert publisher.checksum == ray.get(trainer.group.copied[0], timeout=ANSWER_S)
    assert min(map(len, steps)) > 0, "training stood still while weights were sent"
    return {
        "seconds": round(ended - began, 4),
        "seconds_of_copy": round(copy_s, 4),
        "steps_meanwhile": min(map(len, steps)),
        "steps_a_second_meanwhile": round(min(map(len, steps)) / (ended - began), 2),
    }
